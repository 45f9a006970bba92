"""The requests of a vLLM batch, as its two interfaces tell them, and the penalty on them. Imports no vLLM."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lz_penalty.matches import NOTHING
from lz_penalty.parameters import LZParameters
from lz_penalty.penalty import LZPenalty, penalise_tokens
from lz_penalty.rows import RowParameters

_CATCH_UP = 4
"""Tokens that a request may be behind before its matches are found anew."""


@dataclass
class _Request:
    """A request of V1.

    Attributes:
        parameters: of the penalty.
        output: its output tokens; vLLM's own list, which grows.
        slot: its row of the state.
        taken: how many of the tokens the state has.
    """

    parameters: LZParameters
    output: Sequence[int]
    slot: int
    taken: int = 0

    def known(self) -> int:
        """How many tokens are there. With asynchronous scheduling the last may still be a placeholder, below 0."""
        count = len(self.output)
        while count > self.taken and self.output[count - 1] < 0:
            count -= 1
        return count


class StepBatch:
    """V1: rows of logits are requests, which change places; their output tokens are lists on the host.

    A request keeps its slot of the state wherever it moves. Slot 0 is for all that did not ask.

    Args:
        device: where the logits are.
        width: tokens of a window.
    """

    def __init__(self, device: torch.device | str, width: int) -> None:
        self._requests: dict[int, _Request] = {}
        self._free: list[int] = []
        self._penalty = LZPenalty([None], device, width=width)
        self._slots: Tensor | None = None
        self._rows: RowParameters | None = None

    def remove(self, rows: Iterable[int]) -> None:
        """Requests have ended."""
        for row in rows:
            self._release(self._requests.pop(row, None))

    def add(self, row: int, parameters: LZParameters | None, output: Sequence[int]) -> None:
        """A request has come; one that stood in the row has ended."""
        self.remove([row])
        if parameters is not None:
            if not self._free:
                self._grow()
            request = _Request(parameters, output, self._free.pop())
            self._requests[row] = request
            self._renew(request)
        self._slots = None

    def move(self, first: int, second: int, *, swap: bool) -> None:
        """A request has moved to a second row; what stood there came back, or has ended."""
        moved, met = self._requests.pop(first, None), self._requests.pop(second, None)
        if moved is not None:
            self._requests[second] = moved
        if met is not None and swap:
            self._requests[first] = met
        else:
            self._release(met)
        self._slots = None

    def apply(self, logits: Tensor) -> Tensor:
        """Take in what was sampled since the last step, and penalise."""
        if not self._requests:
            return logits
        self._take()
        if self._slots is None or self._rows is None or len(self._slots) != len(logits):
            slots = [self._requests[row].slot if row in self._requests else 0 for row in range(len(logits))]
            self._slots = torch.tensor(slots).to(self._penalty.device, non_blocking=True)
            parameters = [self._penalty.parameters[slot] for slot in slots]
            self._rows = RowParameters.of(parameters, self._penalty.device, self._penalty.rows.width)
        return self._penalty.apply_to(logits, self._slots, self._rows)

    def _take(self) -> None:
        """Push new tokens, one of each request at a time; that is one push a step."""
        behind = []
        for request in self._requests.values():
            known = request.known()
            if not request.taken <= known <= request.taken + _CATCH_UP:
                self._renew(request)
            elif known > request.taken:
                behind.append((request, known))
        while behind:
            tokens = [0] * len(self._penalty.parameters)
            active = [False] * len(tokens)
            for request, _ in behind:
                tokens[request.slot], active[request.slot] = request.output[request.taken], True
                request.taken += 1
            device = self._penalty.device
            self._penalty.push(
                torch.tensor(tokens).to(device, non_blocking=True), torch.tensor(active).to(device, non_blocking=True)
            )
            behind = [(request, known) for request, known in behind if known > request.taken]

    def _renew(self, request: _Request) -> None:
        request.taken = request.known() if request.output else 0
        self._penalty.replace(request.slot, request.parameters, list(request.output[: request.taken]))

    def _release(self, request: _Request | None) -> None:
        if request is not None:
            self._free.append(request.slot)
            self._slots = None

    def _grow(self) -> None:
        """Twice the slots; what the state has is kept."""
        had = len(self._penalty.parameters)
        self._free += range(had, 2 * had)
        self._penalty.extend(had)


class SlotBatch:
    """V2: requests have slots, with all of their tokens on the device; rows of logits are told at each step.

    Under speculative decoding a request has a row for each draft token, which is known only as this step's input.

    Args:
        requests: vLLM's state of the requests; only read.
        width: tokens of a window.
    """

    def __init__(self, requests: Any, width: int) -> None:
        self._requests = requests
        self._parameters: list[LZParameters | None] = [None] * requests.max_num_reqs
        self._width = width
        self._rows = RowParameters.of(self._parameters, requests.device, width)
        self._stale = False

    def add(self, slot: int, parameters: LZParameters | None) -> bool:
        """A request got a slot. Returns whether it asked for the penalty."""
        self._stale |= self._parameters[slot] != parameters
        self._parameters[slot] = parameters
        return parameters is not None

    def flush(self) -> None:
        """Put the parameters where the logits are."""
        if self._stale:
            self._rows = RowParameters.of(self._parameters, self._requests.device, self._width)
            self._stale = False

    def apply(self, logits: Tensor, ctx: Any) -> Tensor:
        """Penalise the rows of this step."""
        if all(self._parameters[int(slot)] is None for slot in ctx.idx_mapping_np):
            return logits
        self.flush()
        slots = ctx.expanded_idx_mapping.to(torch.int64)
        return penalise_tokens(logits, self._window(slots, ctx), self._rows.select(slots))

    def _window(self, slots: Tensor, ctx: Any) -> Tensor:
        """The last output tokens of each row: committed ones, and behind them those that this step feeds."""
        tokens = self._requests.all_token_ids.gpu
        position = ctx.pos.to(torch.int64).unsqueeze(1)
        place = position + torch.arange(1 - self._width, 1, device=position.device)
        committed = tokens[slots.unsqueeze(1), place.clamp(0, tokens.shape[1] - 1)].to(torch.int64)
        row = torch.arange(len(slots), device=position.device).unsqueeze(1)
        fed = ctx.input_ids.to(torch.int64)[(row - (position - place)).clamp_min(0)]
        first_fed = position - ctx.expanded_local_pos.to(torch.int64).unsqueeze(1)
        window = torch.where(place >= first_fed, fed, committed)
        starts = self._requests.prompt_len.gpu[slots].unsqueeze(1)
        return window.masked_fill(place < starts, NOTHING)
