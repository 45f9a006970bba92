"""Tells answers that run in circles, of which only the text is known. Pure.

Pieces of the text stand for tokens. What a loop is, `lz_penalty.detector` says.
"""

import re

from lz_penalty.detector import ExactLoop, exact_loop, examine

SEEN_PIECES = 4096
"""No more than so many at the end are looked at."""
LOOK_EVERY = 64
"""Pieces between two looks at an answer that is under way."""
SURE_PERIODS = 16
SURE_PIECES = 256
"""What ends an answer early: more than what makes one degenerate at its end, since nobody knows how it would go on."""
_KEPT_PIECES = 2048
_PIECE = re.compile(r"\s*(?:\w+|[^\w\s])")

Circles = dict[str, str | int]


def pieces(text: str) -> list[int]:
    """Words and signs, each with the blanks before it, as numbers: the same number for the same piece."""
    return [hash(piece) for piece in _PIECE.findall(text)]


def circles(text: str) -> Circles | None:
    """What an answer that the length limit ended is told to be; None: it runs in no circles."""
    verdict = examine(pieces(text)[-SEEN_PIECES:], hit_length_limit=True)
    if verdict.loop is None:
        return None
    if isinstance(verdict.loop, ExactLoop):
        return told_of(verdict.loop.period, ended_early=False)
    return {"kind": "drifting loop", "period": 0, "ended_early": 0}


def told_of(period: int, *, ended_early: bool) -> Circles:
    """What is told of an exact loop."""
    return {"kind": "exact loop", "period": period, "ended_early": int(ended_early)}


class LoopWatch:
    """Watches an answer that is under way."""

    def __init__(self) -> None:
        self._pieces: list[int] = []
        self._unseen = 0

    def take(self, text: str) -> int:
        """Take in more text. The period of the loop that it surely is in; 0: none."""
        new = pieces(text)
        self._pieces += new
        self._unseen += len(new)
        if self._unseen < LOOK_EVERY:
            return 0
        self._unseen = 0
        del self._pieces[:-_KEPT_PIECES]
        loop = exact_loop(self._pieces)
        if loop is None or loop.tokens < max(SURE_PIECES, SURE_PERIODS * loop.period):
            return 0
        return loop.period
