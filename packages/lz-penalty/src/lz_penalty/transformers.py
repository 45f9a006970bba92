"""The penalty for Hugging Face transformers' `generate`: `logits_processor=[LZLogitsProcessor()]`.

Written against transformers 5.23, and run under it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import LogitsProcessor

from lz_penalty.devices import on_accelerator
from lz_penalty.parameters import LZParameters
from lz_penalty.penalty import LZPenalty, penalise


class LZLogitsProcessor(LogitsProcessor):  # type: ignore[misc]
    """Subtracts the LZ penalty from the scores of each step. Make one for each call of `generate`.

    It gets all tokens at each step. On a CPU it compares the last of them with those of the previous step: if one token
    was appended, it updates its state; if beams changed places or candidates were taken back, it starts again. On a
    GPU, where comparing would wait for the device, matches are computed anew at each step.

    The prompt ends at the end of the first step's tokens. A later call of `generate` is recognised by its different
    prompt; a call that continues an output unchanged counts that output as generated.

    Args:
        parameters: one for all sequences, or one for each sequence of the batch, which its beams share.
        prompt_length: tokens of the prompt, padding included; default: those of the first step.
        include_prompt: whether the window includes the end of the prompt.
    """

    # transformers drops a processor that says so, with a warning, instead of running it in continuous batching.
    supports_continuous_batching = False

    def __init__(
        self,
        parameters: LZParameters | Sequence[LZParameters | None] | None = None,
        *,
        prompt_length: int | None = None,
        include_prompt: bool = False,
    ) -> None:
        self._parameters = parameters if parameters is not None else LZParameters()
        self._prompt_given = 0 if include_prompt else prompt_length
        self._prompt = self._length = 0
        self._penalty: LZPenalty | None = None
        self._before = torch.empty((0, 0), dtype=torch.int64)
        self._prompt_end = self._before

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return penalised scores; the input is unchanged.

        Args:
            input_ids: all tokens so far, [batch, length].
            scores: of the next token, [batch, vocabulary].

        Raises ValueError if rows are not sequences, as in continuous batching.
        """
        if input_ids.ndim != 2 or scores.ndim != 2:
            raise ValueError(
                "LZ penalty: each row must be a sequence with all of its tokens, as in generate(); "
                f"got tokens of shape {list(input_ids.shape)} and scores of {list(scores.shape)}. "
                "Continuous batching hands over last tokens only and is not supported"
            )
        penalty = self._follow(input_ids)
        penalised = scores.clone(memory_format=torch.contiguous_format)
        if on_accelerator(input_ids):
            return penalise(penalised, input_ids, penalty.rows, starts=self._prompt)
        return penalty.apply(penalised)

    def _follow(self, input_ids: Tensor) -> LZPenalty:
        """Update the state to these tokens."""
        batch, length = input_ids.shape
        known, width = self._before.shape[0] == batch and self._penalty is not None, self._width()
        went_on = known and length == self._length + 1
        penalty = self._penalty
        if penalty is None or not went_on or not self._same_before(input_ids, width):
            if not known or not self._same_generation(input_ids, width):
                self._begin(input_ids, width)
            penalty = self._penalty = self._penalty or self._new(input_ids)
            if not on_accelerator(input_ids):
                penalty.restart(input_ids, starts=self._prompt)
        elif not on_accelerator(input_ids):
            penalty.push(input_ids[:, -1])
        self._length = length
        self._before = input_ids[:, -width:].clone()
        return penalty

    def _same_before(self, input_ids: Tensor, width: int) -> bool:
        """True if the tokens before the newest are those of the previous step; not checked on a GPU."""
        return on_accelerator(input_ids) or torch.equal(self._before, input_ids[:, :-1][:, -width:])

    def _same_generation(self, input_ids: Tensor, width: int) -> bool:
        """True if these tokens start with the prompt of the previous step, and are at most one longer."""
        if self._prompt_given is not None:
            return True
        if not self._prompt <= input_ids.shape[1] <= self._length + 1:
            return False
        return torch.equal(self._prompt_end, input_ids[:, : self._prompt][:, -width:])

    def _begin(self, input_ids: Tensor, width: int) -> None:
        """Take all present tokens as the prompt."""
        self._prompt = input_ids.shape[1] if self._prompt_given is None else self._prompt_given
        self._prompt_end = input_ids[:, : self._prompt][:, -width:].clone()
        self._penalty = None

    def _new(self, input_ids: Tensor) -> LZPenalty:
        """A new state. Raises ValueError if the number of sequences is no multiple of that of the parameters."""
        batch = len(input_ids)
        if isinstance(self._parameters, LZParameters):
            return LZPenalty([self._parameters] * batch, input_ids.device)
        beams, rest = divmod(batch, max(1, len(self._parameters)))
        if rest:
            raise ValueError(f"LZ penalty: {len(self._parameters)} parameters do not fit a batch of {batch} sequences")
        return LZPenalty([each for each in self._parameters for _ in range(beams)], input_ids.device)

    def _width(self) -> int:
        """Number of tokens to compare: the widest window."""
        if isinstance(self._parameters, LZParameters):
            return self._parameters.window
        return max((each.window for each in self._parameters if each is not None), default=1)
