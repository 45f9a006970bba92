"""`LZVllmProcessor` that checks itself in a live engine, by the penalty's definition and vLLM's account of its rows.

Each row that asked is worked out anew in plain Python, from the lists that vLLM's helper keeps (V1) or from its state
of the requests (V2); rows that did not ask must stay as they were, bit by bit.
"""

from typing import Any

import torch
from torch import Tensor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from lz_penalty.parameters import LZParameters
from lz_penalty.reference import penalties
from lz_penalty.vllm import LZVllmProcessor

MOST_OFF = 1e-3
made: list["CheckedLZ"] = []
"""Those of this process."""


class CheckedLZ(LZVllmProcessor):
    """Counts what it has checked: `rows` that asked, the `worst` difference, how many were `wrong` or `touched`."""

    def __init__(self, config: Any, where: Any, pinned: bool | None = None) -> None:
        super().__init__(config, where, pinned)
        self._state, self._told = where, dict[int, Any]()
        self.rows = self.wrong = self.touched = self.placeholders = 0
        self.worst = 0.0
        self.moves: set[str] = set()
        made.append(self)

    def update_state(self, batch_update: Any) -> None:
        if batch_update is not None:
            self.moves |= {direction.name for *_, direction in batch_update.moved}
        process_dict_updates(self._told, batch_update, lambda params, prompt, output: (params, output))
        super().update_state(batch_update)

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        self._told[req_idx] = sampling_params
        return super().add_request(req_idx, sampling_params)

    def apply(self, logits: Tensor, ctx: Any = None) -> Tensor:
        before = logits.clone()
        after: Tensor = super().apply(logits, ctx)
        for row, params, output in self._of_slots(ctx) if ctx is not None else self._of_rows(len(logits)):
            asked = LZParameters.of_request(params.extra_args)
            if asked is None:
                self.touched += not torch.equal(before[row], after[row])
                continue
            self.rows += 1
            known = [token for token in output if token >= 0]
            self.placeholders += len(known) < len(output)
            expected = before[row].clone()
            for token, less in penalties(known, logits.shape[1], asked).items():
                expected[token] -= less
            off = torch.nan_to_num(expected - after[row], nan=0.0).abs().max().item()
            self.worst = max(self.worst, off)
            self.wrong += off > MOST_OFF
        return after

    def _of_rows(self, count: int) -> list[tuple[int, Any, list[int]]]:
        """V1: row, parameters and output of each request."""
        return [(row, params, output) for row, (params, output) in self._told.items() if row < count]

    def _of_slots(self, ctx: Any) -> list[tuple[int, Any, list[int]]]:
        """V2: likewise; the drafts before a row are known only as what this step feeds."""
        found = []
        places = zip(ctx.expanded_idx_mapping.tolist(), ctx.pos.tolist(), ctx.expanded_local_pos.tolist(), strict=False)
        fed = ctx.input_ids.tolist()
        for row, (slot, at, offset) in enumerate(places):
            tokens = self._state.all_token_ids.gpu[slot, : at + 1].tolist()
            for back in range(offset + 1):
                tokens[at - back] = fed[row - back]
            found.append((row, self._told[slot], tokens[int(self._state.prompt_len.gpu[slot]) :]))
        return found
