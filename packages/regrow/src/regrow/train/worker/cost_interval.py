"""How often something that costs time may be done, so that it costs a given part of a step at most. Pure."""

from regrow.core.ids import Seconds, StepNo

_SHARE = 0.0025
_FIRST, _MOST = 16, 1 << 14
_RANKS_A_SECOND = 500
"""So many ranks may tell the coordinator of it each second."""


class CostInterval:
    """Steps between two of them: a power of two, so that workers whose paces differ still meet at some steps."""

    def __init__(self) -> None:
        self.every = StepNo(_FIRST)
        self.world = 1
        self._cost: Seconds | None = None

    def took(self, cost: Seconds, step: Seconds) -> None:
        """It has been done once more. `step`: how long a step took meanwhile."""
        self._cost = cost if self._cost is None else 0.5 * (self._cost + cost)
        step = max(step, 1e-6)
        need = max(self._cost / (_SHARE * step), self.world / _RANKS_A_SECOND / step)
        every = 1
        while every < need and every < _MOST:
            every *= 2
        self.every = StepNo(every)
