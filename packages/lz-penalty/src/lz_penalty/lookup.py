"""Mode `residual` token by token on a CPU, from lookup tables that are computed before the first step.

For given parameters, the penalty of a token depends only on its position, unless it extends the longest match; then it
depends on two integers, the match's length and distance. Both are tables. The longest match and the nearest of equal
length are found at once, encoded as one number. The result is that of `penalty.penalise_window`, bit by bit, with half
as many torch calls.
"""

from math import log2

import torch
from torch import Tensor

from lz_penalty.matches import Matches
from lz_penalty.rows import RowParameters


class ResidualLookup:
    """The tables of a batch.

    Args:
        rows: its parameters, for which `fits` is true.
    """

    def __init__(self, rows: RowParameters) -> None:
        self._rows = rows
        self._places = torch.arange(rows.width, dtype=torch.float32)
        self._vocabulary = 0
        self._by_place = self._by_match = self._less_one = torch.empty(0)

    @staticmethod
    def fits(rows: RowParameters) -> bool:
        """True if the tables cover all that these rows need."""
        return rows.modes == {"residual"} and not rows.by_match and rows.strength.device.type == "cpu"

    def penalise(self, logits: Tensor, matches: Matches, filled: int) -> Tensor:
        """Subtract the penalty from the logits, in place; only the last `filled` columns count. Returns the logits."""
        if not filled or not len(logits):
            return logits
        if self._vocabulary != logits.shape[1]:
            self._fill(logits.shape[1])
        first = self._rows.width - filled
        lengths, at, by_place, places = matches.lengths, matches.window, self._by_place, self._places
        if first:
            lengths, at = lengths.narrow(1, first, filled), at.narrow(1, first, filled)
            by_place, places = by_place.narrow(1, first, filled), places.narrow(0, first, filled)
        # Integers below 2^21, for which floats are exact, and faster than integers.
        floats = lengths.to(torch.float32)
        found = torch.add(places, floats, alpha=self._rows.width).amax(1, keepdim=True).to(torch.int64)
        extended = self._by_match.take(found).mul_(self._rows.strength)
        # 1 where a match is as long as the longest, else 0; extending it costs more than the position alone.
        extends = floats.sub_(self._less_one.take(found)).clamp_min_(0)
        taken = torch.maximum(extends.mul_(extended), by_place)
        after = (logits.gather(1, at) - taken).to(logits.dtype)
        return logits.scatter_reduce_(1, at, after, "amin")

    def _fill(self, vocabulary: int) -> None:
        """The tables for this vocabulary size: by position, and by `length * width + position`."""
        rows = self._rows
        bits, lowest = log2(vocabulary), 0.0 if vocabulary < rows.width + 2 else -torch.inf
        by_place = (bits - rows.nearness).clamp_min_(lowest) * rows.strength
        self._by_place = torch.where(rows.place >= 0, by_place, 0.0)
        longest = torch.arange(rows.most_lookback + 1, dtype=torch.int32).clamp_min_(2).unsqueeze(1)
        self._less_one = (longest - 1).to(torch.float32).repeat(1, rows.width)
        extended = ((longest - 1) / longest * (1 + 1 / rows.distances)).log2_() - 1
        self._by_match = (bits - extended).clamp_min_(lowest)
        self._vocabulary = vocabulary
