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
    """Takes the LZ penalty off the scores of each step. Make one for each call of `generate`.

    It sees all tokens at each step. On a CPU it compares the last of them with those of the step before: where they
    went on by one, its state goes on; where beams changed places or candidates were taken back, it begins anew. On a
    GPU, where looking would hold the device up, matches are found anew at each step.

    The prompt ends where the first step finds the end of the tokens. A later call of `generate` is told by its other
    prompt; one that goes on with an output, as it is, counts that output as its own.

    Args:
        parameters: one for all sequences, or one a sequence of the batch, which its beams share.
        prompt_length: tokens of the prompt, padding included; default: those of the first step.
        include_prompt: whether the window reaches back into the prompt.
    """

    # transformers drops a processor that says so, with a warning, and does not run it on what it does not understand.
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
        """Return penalised scores; the given ones stay as they are.

        Args:
            input_ids: all tokens so far, [batch, length].
            scores: of the next token, [batch, vocabulary].

        Raises ValueError where rows are not sequences, as in continuous batching.
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
        """Bring the state to these tokens."""
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
        """True if the tokens before the newest are those of the step before; not checked on a GPU."""
        return on_accelerator(input_ids) or torch.equal(self._before, input_ids[:, :-1][:, -width:])

    def _same_generation(self, input_ids: Tensor, width: int) -> bool:
        """True if these tokens begin with the prompt of the step before, and are at most one longer."""
        if self._prompt_given is not None:
            return True
        if not self._prompt <= input_ids.shape[1] <= self._length + 1:
            return False
        return torch.equal(self._prompt_end, input_ids[:, : self._prompt][:, -width:])

    def _begin(self, input_ids: Tensor, width: int) -> None:
        """Take the tokens there are for the prompt."""
        self._prompt = input_ids.shape[1] if self._prompt_given is None else self._prompt_given
        self._prompt_end = input_ids[:, : self._prompt][:, -width:].clone()
        self._penalty = None

    def _new(self, input_ids: Tensor) -> LZPenalty:
        """Raises ValueError where the sequences are no multiple of the parameters."""
        batch = len(input_ids)
        if isinstance(self._parameters, LZParameters):
            return LZPenalty([self._parameters] * batch, input_ids.device)
        beams, rest = divmod(batch, max(1, len(self._parameters)))
        if rest:
            raise ValueError(f"LZ penalty: {len(self._parameters)} parameters do not fit a batch of {batch} sequences")
        return LZPenalty([each for each in self._parameters for _ in range(beams)], input_ids.device)

    def _width(self) -> int:
        """Tokens to compare: as many as the widest window has."""
        if isinstance(self._parameters, LZParameters):
            return self._parameters.window
        return max((each.window for each in self._parameters if each is not None), default=1)
