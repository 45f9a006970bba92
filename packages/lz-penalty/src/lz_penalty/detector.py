"""Detection of loops in an output: an exact one at its end, or one that drifts.

Both are found in the tokens alone. An output is *degenerate* only if it ended because it reached the limit on its
length: a list that repeats a line and then stops is what was asked for.
"""

from collections.abc import Sequence
from typing import NamedTuple

LEAST_PERIODS = 4
LEAST_TOKENS = 48
"""An exact loop has this many periods and tokens at least."""

RECENT = 256
GRAM = 4
MOST_REPEATED = 0.5
"""A drifting loop repeats more than this share of the 4-grams of its recent tokens."""


class ExactLoop(NamedTuple):
    """The output ends with the same tokens over and over.

    Attributes:
        period: tokens of a turn, the least that explains the end.
        tokens: how many at the end repeat with this period, the first turn included.
    """

    period: int
    tokens: int


class DriftingLoop(NamedTuple):
    """The output ends with what it said before, in other words now and then.

    Attributes:
        repeated: share of the recent 4-grams that had occurred among them before.
    """

    repeated: float


class LoopVerdict(NamedTuple):
    """Verdict on an output.

    Attributes:
        loop: that was found at its end; None: no loop.
        degenerate: whether there is one, and only the limit on the length ended it.
    """

    loop: ExactLoop | DriftingLoop | None
    degenerate: bool


def examine(tokens: Sequence[int], *, hit_length_limit: bool) -> LoopVerdict:
    """Judge the tokens of an output, without its prompt.

    Args:
        tokens: all of them, or the end; a loop is not found beyond what is given.
        hit_length_limit: whether the limit on the length ended it, not an end token or a stop word.
    """
    loop = exact_loop(tokens) or drifting_loop(tokens)
    return LoopVerdict(loop, loop is not None and hit_length_limit)


def exact_loop(tokens: Sequence[int]) -> ExactLoop | None:
    """Find the least period with which the end repeats, in time that grows with the number of tokens."""
    matching = z_function(tokens[::-1])
    for period in range(1, len(tokens) // LEAST_PERIODS + 1):
        # Read backwards, the output agrees with itself moved by a period, for as long as it is periodic.
        looping = period + matching[period]
        if looping >= max(LEAST_PERIODS * period, LEAST_TOKENS):
            return ExactLoop(period, looping)
    return None


def drifting_loop(tokens: Sequence[int]) -> DriftingLoop | None:
    """Find out whether most of what the recent tokens say they had said before.

    An output with fewer tokens than an exact loop must have is too short to tell.
    """
    repeated = repeated_share(tokens)
    return DriftingLoop(repeated) if len(tokens) >= LEAST_TOKENS and repeated > MOST_REPEATED else None


def repeated_share(tokens: Sequence[int]) -> float:
    """The share of the recent 4-grams that had occurred among them before; 0 where there is none."""
    recent = tuple(tokens[-RECENT:])
    grams = [recent[start : start + GRAM] for start in range(len(recent) - GRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def z_function(tokens: Sequence[int]) -> list[int]:
    """For each place, how many tokens from there on are also the first ones; for the first, all of them.

    Linear in their number: what is known of the stretch that reaches furthest right is not compared again. (Gusfield,
    "Algorithms on Strings, Trees, and Sequences", 1.3.)
    """
    count = len(tokens)
    matching = [count] + [0] * (count - 1) if count else []
    left = right = 0
    for place in range(1, count):
        length = min(matching[place - left], right - place) if place < right else 0
        while place + length < count and tokens[length] == tokens[place + length]:
            length += 1
        matching[place] = length
        if place + length > right:
            left, right = place, place + length
    return matching
