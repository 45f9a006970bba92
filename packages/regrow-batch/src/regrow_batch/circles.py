"""Detects answers that loop, from their text alone. Pure.

Pieces of the text take the place of tokens. `lz_penalty.detector` defines a loop.
"""

import re

from lz_penalty.detector import ExactLoop, exact_loop, examine

SEEN_PIECES = 4096
SEEN_CHARACTERS = 16 * SEEN_PIECES
"""Length of the examined end of an answer."""
LOOK_EVERY = 64
"""Pieces between two checks of an unfinished answer."""
SURE_PERIODS = 16
SURE_PIECES = 256
"""Loop length that ends an answer early: longer than for a finished one, since the text might still leave the loop."""
_KEPT_PIECES = 2048
_LONGEST_WORD = 24
_WITHOUT_BLANKS = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\u9fff\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003ffff"
"""Thai, Lao, Burmese, Khmer, Chinese, Japanese, Korean: each character is a piece, as no blanks separate words."""
_BLANKS = 8
_PIECE = re.compile(rf"\s{{0,{_BLANKS}}}(?:[{_WITHOUT_BLANKS}]|[^\W{_WITHOUT_BLANKS}]+|[^\w\s])|\s{{{_BLANKS + 1},}}")

Circles = dict[str, str | int]


def pieces(text: str) -> list[int]:
    """Words and signs, each with the blanks before it, as numbers: equal pieces have equal numbers.

    In longer runs of blanks, endless words and scripts without blanks, each character is a piece.
    """
    found: list[int] = []
    for piece in _PIECE.findall(text):
        if len(piece) > _LONGEST_WORD or (len(piece) > _BLANKS and piece.isspace()):
            found += map(hash, piece)
        else:
            found.append(hash(piece))
    return found


def circles(text: str) -> Circles | None:
    """Kind of loop in an answer that the length limit ended; None: it does not loop."""
    verdict = examine(pieces(text[-SEEN_CHARACTERS:])[-SEEN_PIECES:], hit_length_limit=True)
    if verdict.loop is None:
        return None
    if isinstance(verdict.loop, ExactLoop):
        return reported(verdict.loop.period, ended_early=False)
    return {"kind": "drifting loop", "period": 0, "ended_early": 0}


def reported_by_server() -> Circles:
    """Description of an answer that its server ended as repetitive."""
    return {"kind": "ended by the server", "period": 0, "ended_early": 1}


def reported(period: int, *, ended_early: bool) -> Circles:
    """Description of an exact loop."""
    return {"kind": "exact loop", "period": period, "ended_early": int(ended_early)}


class LoopWatch:
    """Watches an unfinished answer for a loop."""

    def __init__(self) -> None:
        self._pieces: list[int] = []
        self._unseen = 0
        self._blanks = ""

    def take(self, text: str) -> int:
        """Add text. Returns the period of a certain loop; 0: none."""
        text = self._blanks + text
        reported = text.rstrip()
        self._blanks = text[len(reported) :]
        if len(self._blanks) > _BLANKS:  # too many to belong to the next word
            reported, self._blanks = text, ""
        new = pieces(reported)
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
