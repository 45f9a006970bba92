"""Draws a curve in braille characters, with two by four dots each."""

from collections.abc import Sequence

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_BLANK = 0x2800


def draw_curve(values: Sequence[float], *, width: int, height: int) -> list[str]:
    """Draw `values` from left to right in `height` lines of `width` characters, scaled from the least to the largest.

    More values than dots are averaged evenly; fewer are stretched. Values that are not finite leave a gap.
    """
    columns = _columns([v if _finite(v) else None for v in values], width * 2)
    known = [v for v in columns if v is not None]
    cells = [[0] * width for _ in range(height)]
    if known:
        low, high = min(known), max(known)
        scale = (height * 4 - 1) / (high - low) if high > low else 0.0
        previous: int | None = None
        for x, value in enumerate(columns):
            if value is None:
                previous = None
                continue
            y = height * 4 - 1 - round((value - low) * scale)
            for dot in _span(previous, y):
                cells[dot // 4][x // 2] |= _DOTS[dot % 4][x % 2]
            previous = y
    return ["".join(chr(_BLANK + cell) if cell else " " for cell in row) for row in cells]


def _finite(value: float) -> bool:
    return value - value == 0.0


def _span(previous: int | None, y: int) -> range:
    """The dots of one column, at heights from `previous` to `y`, so that the curve has no gap."""
    if previous is None or abs(previous - y) <= 1:
        return range(y, y + 1)
    return range(y, previous) if y < previous else range(previous + 1, y + 1)


def _columns(values: Sequence[float | None], dots: int) -> list[float | None]:
    if not values:
        return []
    columns: list[float | None] = []
    for x in range(dots):
        start = x * len(values) // dots
        share = [v for v in values[start : max(start + 1, (x + 1) * len(values) // dots)] if v is not None]
        columns.append(sum(share) / len(share) if share else None)
    return columns
