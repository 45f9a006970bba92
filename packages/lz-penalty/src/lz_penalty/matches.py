"""Windows and match lengths of a batch: computed anew, or updated token by token.

A row of a window contains the last tokens of a sequence, the newest at the right, and `NOTHING` in unused places. A
row of lengths contains, for each token of the window, how many tokens before it are also the last of the sequence (U_j
of `reference`). Updated lengths could reach beyond the left end of the window, and are cut there at each step, so both
ways give the same result, bit by bit.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lz_penalty.rows import RowParameters

NOTHING = -1
"""Marks an unused place of a window."""


def window_of(
    history: Tensor, width: int, *, starts: Tensor | int | None = None, ends: Tensor | int | None = None
) -> Tensor:
    """The last tokens of each sequence, int64 [batch, width].

    Args:
        history: tokens, [batch, length].
        width: of the window.
        starts: the first column that counts, [batch] or one for all; default: the first.
        ends: the column after the last that counts, likewise; default: all.
    """
    batch, length = history.shape
    if ends is None and (starts is None or isinstance(starts, int)):
        return _tail(history, width, starts or 0)
    column = torch.arange(width, device=history.device) - width
    end = _column(ends if ends is not None else length, history.device)
    start = _column(starts if starts is not None else 0, history.device)
    place = end + column
    if length == 0:
        return torch.full((batch, width), NOTHING, dtype=torch.int64, device=history.device)
    tokens = history.gather(1, place.clamp(0, length - 1).expand(batch, width)).to(torch.int64)
    return tokens.masked_fill_(place < start, NOTHING)


def _tail(history: Tensor, width: int, start: int) -> Tensor:
    """As `window_of`, if all sequences have one length."""
    tokens = history[:, max(start, history.shape[1] - width) :].to(torch.int64)
    return torch.nn.functional.pad(tokens, (width - tokens.shape[1], 0), value=NOTHING)


def _column(value: Tensor | int, device: torch.device) -> Tensor:
    if isinstance(value, Tensor):
        return value.to(device=device, dtype=torch.int64).reshape(-1, 1)
    return torch.full((1, 1), value, dtype=torch.int64, device=device)


def match_lengths(window: Tensor, rows: RowParameters) -> Tensor:
    """The lengths of all matches of a window, computed anew: int32 of its shape, in `lookback` passes."""
    width = window.shape[1]
    lengths = torch.zeros_like(window, dtype=torch.int32)
    alive = window >= 0
    for back in range(1, min(rows.most_lookback, width - 1) + 1):
        last = window[:, width - back :][:, :1]
        alive = alive[:, 1:] & (window[:, : width - back] == last) & (rows.lookback >= back)
        lengths[:, back:] += alive
    return lengths


@dataclass
class Matches:
    """The window of each sequence of a batch and its match lengths, kept up to date token by token.

    Attributes:
        window: the last tokens, int64 [batch, width].
        lengths: of the matches before them, int32 [batch, width].
        filled: number of columns at the right that have a token in each row; the others have none. None: not known.
        most: upper bound of the tokens; known if `filled` is.
    """

    window: Tensor
    lengths: Tensor
    filled: int | None = None
    most: int = 0
    _written: Tensor | None = None
    _end: int = 0

    @classmethod
    def empty(cls, batch: int, width: int, device: torch.device | str = "cpu") -> "Matches":
        """The state of sequences without tokens."""
        window = torch.full((batch, width), NOTHING, dtype=torch.int64, device=device)
        filled = None if window.device.type != "cpu" else 0
        return cls(window, torch.zeros_like(window, dtype=torch.int32), filled)

    @classmethod
    def found(cls, window: Tensor, rows: RowParameters) -> "Matches":
        """The state of the given windows."""
        filled, most = _filled(window)
        return cls(window, torch.minimum(match_lengths(window, rows), rows.longest), filled, most)

    def push(self, tokens: Tensor, rows: RowParameters, active: Tensor | None = None) -> None:
        """Append one token to each sequence, in time that depends on the window alone.

        A match at j that the new token continues is one longer; any other match ends. The window moves left by one, and
        the tokens of the lengths with it, so the lengths stay in place.

        Args:
            tokens: int64 [batch].
            rows: parameters of the batch.
            active: bool [batch]; sequences where it is false do not change. Default: all are active.
        """
        new = tokens.unsqueeze(1)
        if active is None:
            torch.minimum(self.lengths.add_(rows.one), rows.longest, out=self.lengths).mul_(self.window == new)
            self._append(tokens)
            return
        longer = torch.minimum(self.lengths + 1, rows.longest) * (self.window == new)
        going = active.unsqueeze(1)
        self.window = torch.where(going, torch.cat((self.window[:, 1:], new), dim=1), self.window)
        self.lengths = torch.where(going, longer, self.lengths)
        self._written, self.filled = None, None

    def _append(self, tokens: Tensor) -> None:
        """Move the window by one in a buffer of twice its width, which copies its tokens once in a window's width."""
        batch, width = self.window.shape
        written = self._written
        if written is None or self._end == written.shape[1]:
            written = self.window.new_empty((batch, 2 * width))
            written[:, :width] = self.window
            self._written, self._end = written, width
        written.select(1, self._end).copy_(tokens)
        self._end += 1
        self.window = written.narrow(1, self._end - width, width)
        if self.filled is not None and batch:
            known: list[int] = tokens.tolist()
            self.filled = min(self.filled + 1, width) if min(known) >= 0 else None
            self.most = max(self.most, *known)


def _filled(window: Tensor) -> tuple[int | None, int]:
    """`Matches.filled` and `Matches.most` of a window; not known on a GPU, where reading them would be slow."""
    if window.device.type != "cpu" or not window.numel():
        return None, 0
    real = window >= 0
    count = int(real[0].sum())
    as_one = int(real.sum()) == count * len(window) and bool(real[:, window.shape[1] - count :].all())
    return (count if as_one else None), int(window.amax())
