"""Measures how long a body works without waiting for others: this separates slow ranks from those that wait for them.

It is the time up to the update in which no collective is under way. If the end of collectives cannot be seen (on a GPU)
it is the time up to the first collective: of the host only, which may be ahead of its device.
"""

from regrow.comm.flight import FLIGHT
from regrow.core.ids import Seconds

_POINT_TO_POINT = ("send", "recv", "recv_anysource")


class OwnTime:
    """Measures the own time of one worker in each body.

    Args:
        unit: ranks of one replica.
    """

    def __init__(self, unit: int) -> None:
        self._unit = unit
        self._begun: Seconds | None = None
        self.seconds: Seconds = 0.0
        """Own time of the newest body; 0 if not known."""

    def begin(self) -> None:
        """Start the clock of a body."""
        self._begun, self.seconds = FLIGHT.idle(), 0.0

    def called(self, name: str) -> None:
        """Note that the body calls a collective: stop the clock if the collective's end cannot be seen."""
        if self._begun is None:
            return
        if name in _POINT_TO_POINT and self._unit == 1:
            self._begun = None  # stages of a pipeline: their work differs, and ranks of the same stage are not known
        elif FLIGHT.any_unseen:
            self.end()

    def end(self) -> None:
        """Stop the clock, unless it has stopped: the body has reached its update."""
        if self._begun is not None:
            self.seconds = FLIGHT.idle() - self._begun
            self._begun = None
