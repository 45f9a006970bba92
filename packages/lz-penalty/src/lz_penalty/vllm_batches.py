"""The requests of a vLLM batch in its two interfaces, and the penalty on them. Imports no vLLM."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lz_penalty.matches import NOTHING
from lz_penalty.parameters import LZParameters
from lz_penalty.penalty import penalise_matches, penalise_tokens
from lz_penalty.rows import RowParameters
from lz_penalty.slots import Joining, ParameterCount, Slots

_CATCH_UP = 4
"""A request that is more tokens behind than this has its matches computed anew."""
_NOT_YET = -1
"""No slot."""


@dataclass(eq=False, slots=True)
class _Request:
    """A request of V1.

    Attributes:
        parameters: of the penalty.
        output: its output tokens; vLLM's own list, which grows.
        row: of the logits; none after it has ended.
        slot: of the state.
        taken: number of its tokens that the state has.
    """

    parameters: LZParameters
    output: Sequence[int]
    row: int | None
    slot: int = _NOT_YET
    taken: int = 0

    def known(self) -> int:
        """Number of known tokens. With asynchronous scheduling the last may still be a placeholder below 0."""
        count = len(self.output)
        while count > self.taken and self.output[count - 1] < 0:
            count -= 1
        return count

    def begun(self, width: int) -> Joining:
        """The request as it is now, for a slot with a window of `width` tokens."""
        self.taken = self.known() if self.output else 0
        return Joining(self.parameters, self.output[max(0, self.taken - width) : self.taken])


class StepBatch:
    """V1: rows of logits are requests, which change rows; their output tokens are lists on the host.

    Changes are recorded as they are reported, and applied at the next step, all at once. Only requests with a penalty
    have a slot of the state; the row of each slot is given at each step.

    Args:
        device: where the logits are.
        width: tokens of a window.
    """

    def __init__(self, device: torch.device | str, width: int) -> None:
        self.slots = Slots(device, width)
        self._requests: dict[int, _Request] = {}
        self._in_slots: list[_Request] = []
        self._come: list[_Request] = []
        self._gone: list[_Request] = []
        self._lines: Tensor | None = None
        self._notified = False
        """True if rows have changed since `_lines` were made."""

    def remove(self, rows: Iterable[int]) -> None:
        """Record that requests have ended."""
        for row in rows:
            self._release(self._requests.pop(row, None))

    def add(self, row: int, parameters: LZParameters | None, output: Sequence[int]) -> None:
        """Record that a request has arrived; an earlier one in that row has ended."""
        self._release(self._requests.pop(row, None))
        if parameters is not None:
            request = self._requests[row] = _Request(parameters, output, row)
            self._come.append(request)
        self._notified = True

    def move(self, first: int, second: int, *, swap: bool) -> None:
        """Record that a request has moved to another row; the request there moved to its old row, or has ended."""
        moved, met = self._requests.pop(first, None), self._requests.pop(second, None)
        if moved is not None:
            self._requests[second], moved.row = moved, second
        if met is not None and swap:
            self._requests[first], met.row = met, first
        else:
            self._release(met)
        self._notified = True

    def apply(self, logits: Tensor) -> Tensor:
        """Append the tokens sampled since the last step, and penalise."""
        if not self._requests:
            if self._gone:
                self._settle()
            return logits
        if self._come or self._gone:
            self._settle()
        self._take()
        if self._notified or (self._lines is None and len(logits) != self.slots.count):
            self._place(len(logits))
        return penalise_matches(logits, self.slots.matches, self.slots.rows, self._lines)

    def _settle(self) -> None:
        """Free the slots of ended requests, and give slots to new ones."""
        for before, slot in self.slots.leave([request.slot for request in self._gone]):
            # The moved ones are the last, in order, and the list is cut after them.
            self._in_slots[slot] = self._in_slots[before]
            self._in_slots[slot].slot = slot
        del self._in_slots[self.slots.count :]
        self._gone.clear()
        come = [request for request in self._come if request.row is not None]
        slots = self.slots.join([request.begun(self.slots.width) for request in come])
        for request, slot in zip(come, slots, strict=True):
            request.slot = slot
        self._in_slots += come
        self._come.clear()
        self._notified = True

    def _place(self, count: int) -> None:
        """Find the row of logits of each slot; no list is needed if they are equal."""
        lines = [request.row for request in self._in_slots]
        as_they_are = lines == list(range(count))
        self._lines = None if as_they_are else torch.tensor(lines).to(self.slots.device, non_blocking=True)
        self._notified = False

    def _take(self) -> None:
        """Append new tokens, one for each request at a time, usually one push a step."""
        anew, most = [], 0
        ahead = []
        for request in self._in_slots:
            known = request.known()
            new = known - request.taken
            if not 0 <= new <= _CATCH_UP:
                anew.append(request)
                new = 0
            most = max(most, new)
            ahead.append(new)
        if anew:
            self.slots.renew([each.slot for each in anew], [each.begun(self.slots.width) for each in anew])
        for turn in range(most):
            tokens, waiting = [0] * len(ahead), []
            for slot, (request, new) in enumerate(zip(self._in_slots, ahead, strict=True)):
                if turn < new:
                    tokens[slot] = request.output[request.taken]
                    request.taken += 1
                else:
                    waiting.append(slot)
            self.slots.push(tokens, waiting)

    def _release(self, request: _Request | None) -> None:
        if request is not None:
            request.row = None
            if request.slot != _NOT_YET:
                self._gone.append(request)


class SlotBatch:
    """V2: requests have slots, with all their tokens on the device; the rows of logits are given at each step.

    Under speculative decoding a request has a row for each draft token, which is only known as this step's input.

    Args:
        requests: vLLM's state of the requests; only read.
        width: tokens of a window.
    """

    def __init__(self, requests: Any, width: int) -> None:
        self._requests = requests
        self._parameters: list[LZParameters | None] = [None] * requests.max_num_reqs
        self._width = width
        self._known = ParameterCount()
        self._columns = RowParameters.of(self._parameters, requests.device, width)
        self._rows = self._columns
        self._stale: dict[int, LZParameters | None] = {}

    def add(self, slot: int, parameters: LZParameters | None) -> bool:
        """Record that a request got a slot. Returns True if it asked for the penalty."""
        before = self._parameters[slot]
        if before != parameters:
            for each, count in ((before, -1), (parameters, 1)):
                if each is not None:
                    self._known.remember(each, count)
            self._parameters[slot] = self._stale[slot] = parameters
        return parameters is not None

    def flush(self) -> None:
        """Copy new parameters to the device, all at once."""
        if not self._stale:
            return
        new = RowParameters.of([*self._stale.values()], self._requests.device, self._width)
        at = torch.tensor([*self._stale]).to(self._requests.device, non_blocking=True)
        for column, values in zip(self._columns.tensors(), new.tensors(), strict=True):
            column[at] = values
        self._rows = self._columns.first(len(self._parameters), *self._known.said())
        self._stale.clear()

    def apply(self, logits: Tensor, ctx: Any) -> Tensor:
        """Penalise the rows of this step."""
        if all(self._parameters[int(slot)] is None for slot in ctx.idx_mapping_np):
            return logits
        self.flush()
        slots = ctx.expanded_idx_mapping.to(torch.int64)
        return penalise_tokens(logits, self._window(slots, ctx), self._rows.select(slots))

    def _window(self, slots: Tensor, ctx: Any) -> Tensor:
        """The last output tokens of each row: committed ones, then those that this step feeds."""
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
