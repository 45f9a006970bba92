"""Detects loops in an output: an exact loop at its end, or one that drifts.

Both are found from the tokens alone. An output is *degenerate* only if it ended because it reached the limit on its
length: a list that repeats a line and then stops is intended.
"""

from collections.abc import Sequence
from typing import NamedTuple

LEAST_PERIODS = 4
LEAST_TOKENS = 48
"""Minimum length of an exact loop, in periods and in tokens."""

RECENT = 256
GRAM = 4
MOST_REPEATED = 0.5
"""A drifting loop repeats more than this share of the 4-grams of its recent tokens."""


class ExactLoop(NamedTuple):
    """The output ends with the same tokens over and over.

    Attributes:
        period: tokens of one turn: the smallest period of the end.
        tokens: number of tokens at the end that repeat with this period, the first turn included.
    """

    period: int
    tokens: int


class DriftingLoop(NamedTuple):
    """The output ends by repeating its earlier text, with variations.

    Attributes:
        repeated: share of the recent 4-grams that had occurred among the recent tokens before.
    """

    repeated: float


class LoopVerdict(NamedTuple):
    """Verdict on an output.

    Attributes:
        loop: the loop at its end; None: no loop.
        degenerate: whether it loops and only the limit on the length ended it.
    """

    loop: ExactLoop | DriftingLoop | None
    degenerate: bool


def examine(tokens: Sequence[int], *, hit_length_limit: bool) -> LoopVerdict:
    """Judge the tokens of an output, without its prompt.

    Args:
        tokens: all of them, or only the end; longer loops than the given tokens are not found.
        hit_length_limit: whether the limit on the length ended the output, rather than an end token or a stop word.
    """
    loop = exact_loop(tokens) or drifting_loop(tokens)
    return LoopVerdict(loop, loop is not None and hit_length_limit)


def exact_loop(tokens: Sequence[int]) -> ExactLoop | None:
    """Find the smallest period of the end, in time linear in the number of tokens."""
    matching = z_function(tokens[::-1])
    for period in range(1, len(tokens) // LEAST_PERIODS + 1):
        # Reversed, the output agrees with itself shifted by a period, for as long as it is periodic.
        looping = period + matching[period]
        if looping >= max(LEAST_PERIODS * period, LEAST_TOKENS):
            return ExactLoop(period, looping)
    return None


def drifting_loop(tokens: Sequence[int]) -> DriftingLoop | None:
    """Return a drifting loop if most of the recent 4-grams had occurred before.

    An output shorter than the minimum of an exact loop is not examined.
    """
    repeated = repeated_share(tokens)
    return DriftingLoop(repeated) if len(tokens) >= LEAST_TOKENS and repeated > MOST_REPEATED else None


def repeated_share(tokens: Sequence[int]) -> float:
    """The share of the recent 4-grams that had occurred among the recent tokens before; 0 if there are none."""
    recent = tuple(tokens[-RECENT:])
    grams = [recent[start : start + GRAM] for start in range(len(recent) - GRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def z_function(tokens: Sequence[int]) -> list[int]:
    """For each position, the length of the longest prefix of the tokens that starts there; for the first, all of them.

    Linear time: the part of the match that reaches furthest right is not compared again. (Gusfield,
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
