"""The parameters of a batch as tensors on the logits' device, one row a sequence."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lz_penalty.parameters import MODES, LZParameters, Mode


@dataclass(frozen=True)
class RowParameters:
    """Columns of shape [batch, 1], and their bounds on the host, so that no step has to synchronize with the device.

    Attributes:
        strength: float32; 0 for a row without a penalty.
        window: int32, at most `width`.
        lookback: int32, at most `most_lookback`.
        min_match: int32.
        mode: int32, the index in `MODES`.
        place: int32 [batch, width], position of a token in its row's own window, the oldest at 0.
        longest: int32 [batch, width], longest possible match there: `lookback`, or up to its window's left end.
        one: int32, the number 1.
        distances: float32 [width], distance of each token from the next one; `nearness`: their log2.
        width: tokens that a row of the state holds.
        modes: those that occur.
        most_lookback: maximum over all rows.
        by_match: whether any row needs the longest match of each token before the penalty.
    """

    strength: Tensor
    window: Tensor
    lookback: Tensor
    min_match: Tensor
    mode: Tensor
    place: Tensor
    longest: Tensor
    one: Tensor
    distances: Tensor
    nearness: Tensor
    width: int
    modes: frozenset[Mode]
    most_lookback: int
    by_match: bool

    @classmethod
    def of(
        cls, parameters: Sequence[LZParameters | None], device: torch.device | str = "cpu", width: int | None = None
    ) -> "RowParameters":
        """Put the parameters of sequences on a device; None: that sequence gets no penalty.

        Raises ValueError if a window is wider than `width`, the tokens that a row holds (default: the widest window).
        """
        every = [each if each is not None else LZParameters(strength=0.0, window=1) for each in parameters]
        width = width if width is not None else max((each.window for each in every), default=1)
        for each in every:
            if each.window > width:
                raise ValueError(f"LZ penalty: a window of {each.window} tokens is asked for, {width} are kept")

        def column(values: list[int] | list[float], dtype: torch.dtype) -> Tensor:
            # Pinned memory would make this asynchronous; it is a few bytes, only when the batch changes.
            return torch.tensor(values, dtype=dtype).unsqueeze(1).to(device, non_blocking=True)

        windows = column([each.window for each in every], torch.int32)
        distances = torch.arange(width, 0, -1, dtype=torch.float32, device=device)
        place = torch.arange(width, dtype=torch.int32, device=device) - (width - windows)
        lookback = column([each.lookback for each in every], torch.int32)
        return cls(
            strength=column([each.strength for each in every], torch.float32),
            window=windows,
            lookback=lookback,
            min_match=column([each.min_match for each in every], torch.int32),
            mode=column([MODES.index(each.mode) for each in every], torch.int32),
            place=place,
            longest=torch.minimum(place, lookback).clamp_min_(0),
            one=torch.ones((), dtype=torch.int32, device=device),
            distances=distances,
            nearness=distances.log2(),
            width=width,
            modes=frozenset(each.mode for each in every if each.strength > 0),
            most_lookback=max((each.lookback for each in every), default=1),
            by_match=any(each.by_match for each in every),
        )

    def select(self, rows: Tensor) -> "RowParameters":
        """The parameters of the rows with these indices, int64 [count].

        `modes`, `most_lookback` and `by_match` are kept: they cover all rows, so they also hold for any subset.
        """
        return self.each(lambda column: column[rows])

    def first(self, count: int, modes: frozenset[Mode], most_lookback: int, by_match: bool) -> "RowParameters":
        """The parameters of the first rows, with their bounds."""
        found = self.each(lambda column: column[:count])
        return replace(found, modes=modes, most_lookback=most_lookback, by_match=by_match)

    def tensors(self) -> list[Tensor]:
        """Tensors with a row for each sequence."""
        return [getattr(self, name) for name in _BY_ROW]

    def each(self, change: Callable[[Tensor], Tensor]) -> "RowParameters":
        """The same parameters, with a function applied to each of `tensors`."""
        changed: dict[str, Any] = {name: change(getattr(self, name)) for name in _BY_ROW}
        return replace(self, **changed)


_BY_ROW = ("strength", "window", "lookback", "min_match", "mode", "place", "longest")
