"""Cost of recovery from an incident, by the rung and the size of the world. Pure."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from regrow.core.errors import UsageError
from regrow.core.ids import Seconds
from regrow_lab.fleet.scenario import CostRow

START = "start"


@dataclass(frozen=True)
class StageTimes:
    """Durations of the stages of an incident; the whole world passes them one after another."""

    detect: Seconds = 0.0
    abort: Seconds = 0.0
    regroup: Seconds = 0.0
    hydrate: Seconds = 0.0
    redo: Seconds = 0.0

    @property
    def total(self) -> Seconds:
        """Sum of all stages."""
        return self.detect + self.abort + self.regroup + self.hydrate + self.redo


class CostTable:
    """One set of costs.

    Between two measured sizes, a stage is interpolated linearly over the logarithm of the ranks. Above the largest, the
    last slope continues, but never falls; below the smallest, the stage is constant.

    Args:
        name: name of the set.
        rows: rows of all sets.
    """

    def __init__(self, name: str, rows: Sequence[CostRow]) -> None:
        self.name = name
        self._points: dict[str, list[tuple[float, StageTimes]]] = {}
        for row in sorted((row for row in rows if row.of == name), key=lambda row: row.ranks):
            self._points.setdefault(row.rung, []).append((math.log2(row.ranks), _stages(row)))

    def of(self, rung: str, ranks: int) -> StageTimes:
        """Cost of `rung` in a world of `ranks`. Raises `UsageError` if the table has none."""
        points = self._points.get(rung) or self._points.get("")
        if points is None or (rung == START and START not in self._points):
            if rung == START:
                return StageTimes()
            there = ", ".join(sorted(self._points)) or "none"
            raise UsageError(
                f'costs of "{self.name}" have no row for the rung "{rung}", which a recovery takes (rows: {there})',
                hint=f'add [[costs]] of = "{self.name}", rung = "{rung}", or a row without a rung for all others',
            )
        return _between(points, math.log2(max(1, ranks)))


def _stages(row: CostRow) -> StageTimes:
    if row.total:
        return StageTimes(
            row.detect, row.abort, row.total - row.detect - row.abort - row.hydrate - row.redo, row.hydrate, row.redo
        )
    return StageTimes(row.detect, row.abort, row.regroup, row.hydrate, row.redo)


def _between(points: Sequence[tuple[float, StageTimes]], size: float) -> StageTimes:
    at = bisect_right([each[0] for each in points], size)
    if len(points) == 1 or at == 0:
        return points[0 if at == 0 else -1][1]
    beyond = at == len(points)
    (low, small), (high, large) = points[at - 2 if beyond else at - 1], points[at - 1 if beyond else at]
    part = (size - low) / (high - low) if high > low else 1.0

    def line(name: str) -> Seconds:
        first, last = getattr(small, name), getattr(large, name)
        return float(max(last, first + part * (last - first)) if beyond else first + part * (last - first))

    return StageTimes(*(line(name) for name in ("detect", "abort", "regroup", "hydrate", "redo")))
