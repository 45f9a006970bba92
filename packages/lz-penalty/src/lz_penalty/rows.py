"""The parameters of a batch, one row a sequence, where the logits are."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lz_penalty.parameters import MODES, LZParameters, Mode


@dataclass(frozen=True)
class RowParameters:
    """Columns of shape [batch, 1], and what the host knows of them, so that no step has to ask the device.

    Attributes:
        strength: float32; 0 where a row gets no penalty.
        window: int32, at most `width`.
        lookback: int32, at most `most_lookback`.
        min_match: int32.
        mode: int32, the place in `MODES`.
        place: int32 [batch, width], where a token of a row stands in the row's own window, the oldest at 0.
        longest: int32 [batch, width], how long a match there can be: `lookback`, or up to its window's left end.
        one: int32, the number.
        distances: float32 [width], how far back the tokens of a row stand; `nearness`: their log2.
        width: tokens a row of the state holds.
        modes: those that occur.
        most_lookback: of all rows.
        by_match: whether a row needs the longest match of each token before it can be penalised.
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
        """Put the parameters of sequences where their logits are; None: this sequence gets no penalty.

        Raises ValueError where a window is wider than `width`, the tokens that a row holds (default: the widest).
        """
        every = [each if each is not None else LZParameters(strength=0.0, window=1) for each in parameters]
        width = width if width is not None else max((each.window for each in every), default=1)
        for each in every:
            if each.window > width:
                raise ValueError(f"LZ penalty: a window of {each.window} tokens is asked for, {width} are kept")

        def column(values: list[int] | list[float], dtype: torch.dtype) -> Tensor:
            # From pinned memory it would be asynchronous; it is a few bytes, and only where the batch changes.
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
        """The parameters of some rows, int64 [count], in that order; what the host knows holds for all of them."""
        return self.each(lambda column: column[rows])

    def first(self, count: int, modes: frozenset[Mode], most_lookback: int, by_match: bool) -> "RowParameters":
        """The parameters of the first rows, and what the host knows of these."""
        found = self.each(lambda column: column[:count])
        return replace(found, modes=modes, most_lookback=most_lookback, by_match=by_match)

    def tensors(self) -> list[Tensor]:
        """Tensors with a row for each sequence."""
        return [getattr(self, name) for name in _BY_ROW]

    def each(self, change: Callable[[Tensor], Tensor]) -> "RowParameters":
        """The same with what a function makes of each of `tensors`."""
        changed: dict[str, Any] = {name: change(getattr(self, name)) for name in _BY_ROW}
        return replace(self, **changed)


_BY_ROW = ("strength", "window", "lookback", "min_match", "mode", "place", "longest")
