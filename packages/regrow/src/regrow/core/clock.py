"""Time as the package reads it. State machines get `now` as an argument; only the code around them reads a clock."""

import time
from typing import Protocol

from regrow.core.ids import Instant


class Clock(Protocol):
    """Clock for the code that does I/O around a state machine."""

    def now(self) -> Instant:
        """Seconds on a clock that never goes back."""
        ...


class MonotonicClock:
    """Monotonic clock of this computer."""

    def now(self) -> Instant:
        """Seconds since an arbitrary start, the same for all processes of this computer."""
        return time.monotonic()
