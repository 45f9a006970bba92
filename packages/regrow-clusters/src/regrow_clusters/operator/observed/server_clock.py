"""The API server's clock, by which the times in objects are set."""

import time
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from typing import Final

from regrow.core.ids import Instant, Seconds

_SLACK: Final[Seconds] = 3.0
"""The header `Date` has whole seconds."""


class ServerClock:
    """Seconds since the epoch by the API server's clock. `wall`: this machine's clock, used while both agree."""

    def __init__(self, wall: Callable[[], Instant] = time.time) -> None:
        self.wall, self.ahead = wall, 0.0

    def __call__(self) -> Instant:
        """Time now."""
        return self.wall() + self.ahead

    def set(self, date: str, asked_at: Instant) -> None:
        """Adjust to the header `Date` of an answer, written between `asked_at` (by this machine's clock) and now."""
        try:
            least = parsedate_to_datetime(date).timestamp()
        except ValueError:
            return
        early, late = least - self.wall(), least + 1.0 - asked_at
        if not early <= self.ahead <= late:  # a slow answer gives wide bounds, which agree
            self.ahead = early if early > _SLACK else late if late < -_SLACK else 0.0
