"""Histories of all kinds, and logits for them, the same in each run."""

import random
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lz_penalty.parameters import MODES, LZParameters

ROWS = 10
"""Sequences of a batch."""


class Case(NamedTuple):
    """A batch of sequences."""

    vocabulary: int
    histories: list[list[int]]
    parameters: list[LZParameters | None]
    logits: Tensor

    def padded(self) -> Tensor:
        """The histories as one tensor, each from the left, with token 0 behind."""
        width = max(map(len, self.histories), default=0)
        return torch.tensor([history + [0] * (width - len(history)) for history in self.histories])

    def ends(self) -> Tensor:
        return torch.tensor([len(history) for history in self.histories])


def logits_of(rows: int, vocabulary: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3


def assert_close(got: Tensor, expected: Tensor) -> None:
    """The reference counts in double precision, the others in single."""
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=2e-5)


def taken(case: Case, after: Tensor) -> Tensor:
    """Difference of the logits before and after."""
    return case.logits - after


def cases(seed: int, batches: int, longest: int = 40) -> Iterator[Case]:
    """Batches of sequences: random ones, loops, loops with slips, and empty ones; each with its own parameters."""
    draw = random.Random(seed)
    for _ in range(batches):
        vocabulary = draw.choice([2, 5, 30, 700])
        histories = [history(draw, vocabulary, longest) for _ in range(ROWS)]
        if not any(histories):
            histories[0] = [1]
        parameters = [None if draw.random() < 0.1 else some_parameters(draw) for _ in histories]
        # Some models have tokens that they cannot say: there are fewer logits than tokens.
        vocabulary -= draw.choice([0, 0, 1])
        yield Case(vocabulary, histories, parameters, logits_of(ROWS, vocabulary, draw.randrange(2**31)))


def history(draw: random.Random, vocabulary: int, longest: int) -> list[int]:
    length = draw.randint(0, longest)
    match draw.choice(["random", "few", "loop", "loop", "slips"]):
        case "random":
            return [draw.randrange(vocabulary) for _ in range(length)]
        case "few":
            return [draw.randrange(min(vocabulary, 3)) for _ in range(length)]
        case kind:
            turn = [draw.randrange(vocabulary) for _ in range(draw.randint(1, 9))]
            tokens = [turn[place % len(turn)] for place in range(length)]
            slips = length // 12 if kind == "slips" else 0
            for _ in range(slips):
                tokens[draw.randrange(length)] = draw.randrange(vocabulary)
            return tokens


def some_parameters(draw: random.Random) -> LZParameters:
    return LZParameters(
        mode=draw.choice(MODES),
        strength=draw.choice([0.0, 0.15, 0.15, 1.0]),
        window=draw.choice([1, 4, 13, 64, 512]),
        lookback=draw.choice([1, 3, 32, 32]),
        min_match=draw.choice([1, 1, 1, 2, 3, 5]),
    )
