"""Time as the package reads it. Machines get `now` passed in; only what carries out reads a clock."""

import time
from typing import Protocol

from regrow.core.ids import Instant


class Clock(Protocol):
    """Clock of the I/O around a machine."""

    def now(self) -> Instant:
        """Seconds on a clock that never goes back."""
        ...


class MonotonicClock:
    """The machine's monotonic clock."""

    def now(self) -> Instant:
        """Seconds since an arbitrary start, the same for all processes of this machine."""
        return time.monotonic()
