"""Cost of a step of the LZ penalty on this machine, against transformers' own repetition penalty."""

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

from lz_penalty.parameters import LZParameters
from lz_penalty.penalty import LZPenalty
from lz_penalty.transformers import LZLogitsProcessor

VOCABULARIES = (32_000, 152_064)
BATCHES = (1, 8, 64)
CONTEXTS = (2_048, 32_768)


class Cost(NamedTuple):
    """Microseconds a step, the median of the rounds.

    Attributes:
        theirs: transformers' repetition penalty, as used by `generate`.
        ours: the LZ penalty, as used by `generate`; both return new scores.
        in_place: the LZ penalty on logits that it may edit, as in servers.
        ratio: the median over the rounds of ours over theirs in the same round.
    """

    vocabulary: int
    batch: int
    context: int
    theirs: float
    ours: float
    in_place: float
    ratio: float


def measure(rounds: int) -> Iterator[Cost]:
    """Measure all shapes; in a round each side has a turn, and each round starts with another side."""
    for vocabulary, batch, context in product(VOCABULARIES, BATCHES, CONTEXTS):
        yield measure_shape(vocabulary, batch, context, rounds)


def measure_shape(vocabulary: int, batch: int, context: int, rounds: int) -> Cost:
    """Measure one shape. The window is full, and includes the prompt, as for the other penalty."""
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocabulary, (batch, context + rounds + 2), generator=draw)
    logits = torch.randn(batch, vocabulary, generator=draw)
    theirs, ours = RepetitionPenaltyLogitsProcessor(1.1), LZLogitsProcessor(include_prompt=True)
    state = LZPenalty([LZParameters()] * batch)
    state.restart(tokens[:, :context])
    ours(tokens[:, :context].contiguous(), logits)

    def in_place(so_far: Tensor, scores: Tensor) -> Tensor:
        state.push(so_far[:, -1])
        return state.apply(scores)

    sides: Sequence[Callable[[Tensor, Tensor], Tensor]] = (theirs, ours, in_place)
    took: list[list[float]] = [[], [], []]
    for number in range(rounds + 1):
        so_far = tokens[:, : context + number + 1].contiguous()
        for place in range(len(sides)):
            side = (place + number) % len(sides)
            began = time.perf_counter()
            sides[side](so_far, logits)
            took[side].append(time.perf_counter() - began)
    theirs_us, ours_us, in_place_us = (1e6 * median(each[1:]) for each in took)
    ratio = median(mine / other for mine, other in zip(took[1][1:], took[0][1:], strict=True))
    return Cost(vocabulary, batch, context, theirs_us, ours_us, in_place_us, ratio)
