"""The API server's clock: times in objects are its own, and are not to be held against another machine's clock."""

import logging
import time
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from typing import Final

from regrow.core.ids import Instant, Seconds

_SLACK: Final[Seconds] = 3.0
"""A difference that does no harm; the header `Date` has whole seconds."""
_LOG = logging.getLogger("regrow.operator")


class ServerClock:
    """Seconds since the epoch, as the API server has them; this machine's, where the two hardly differ.

    An operator whose clock is minutes ahead would take each pod's grace, and its time to start, for over.

    Args:
        wall: this machine's clock.
    """

    def __init__(self, wall: Callable[[], Instant] = time.time) -> None:
        self.wall = wall
        self.ahead: Seconds = 0.0

    def __call__(self) -> Instant:
        """Time now."""
        return self.wall() + self.ahead

    def heard(self, date: str, asked_at: Instant) -> None:
        """Take the header `Date` of an answer. `asked_at`: when it was asked for, by this machine's clock."""
        try:
            said = parsedate_to_datetime(date).timestamp()
        except ValueError:
            return
        now, before = self.wall(), self.ahead
        if said > now + _SLACK:
            self.ahead = said - now
        elif said + 1.0 < asked_at - _SLACK:  # however long the answer took, it was written later than that
            self.ahead = said + 1.0 - asked_at
        else:
            self.ahead = 0.0
        if abs(self.ahead - before) > _SLACK:
            _LOG.warning("the API server's clock is %+.0f s from this machine's: the server's is used", self.ahead)
