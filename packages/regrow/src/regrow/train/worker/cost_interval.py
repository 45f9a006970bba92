"""Chooses the interval between actions that cost time, so that they take at most a given part of each step. Pure."""

from regrow.core.ids import Seconds, StepNo

_SHARE = 0.0025
_FIRST, _MOST = 16, 1 << 14
_RANKS_A_SECOND = 500
"""Ranks that may report an action to the coordinator each second."""


class CostInterval:
    """Steps between two actions: a power of two, so that workers with different intervals still act at common steps."""

    def __init__(self) -> None:
        self.every = StepNo(_FIRST)
        self.world = 1
        self._cost: Seconds | None = None

    def took(self, cost: Seconds, step: Seconds) -> None:
        """Note that an action took `cost`, while a step took `step`."""
        self._cost = cost if self._cost is None else 0.5 * (self._cost + cost)
        step = max(step, 1e-6)
        need = max(self._cost / (_SHARE * step), self.world / _RANKS_A_SECOND / step)
        every = 1
        while every < need and every < _MOST:
            every *= 2
        self.every = StepNo(every)
