"""Connections and requests of who has no business here: closed, counted, and told of ever less often."""

import logging
import threading
from collections import Counter
from collections.abc import Mapping
from typing import Final

from regrow.core.ids import Seconds

MOST: Final = 64
"""Callers at one door of whom it is not known yet who they are."""
HELLO_S: Final[Seconds] = 5.0
"""Until they have said it."""
TURN_S: Final[Seconds] = 0.25
"""Least stay of each, however many others wait: a newcomer on a busy node needs some of it to say who it is."""
_log = logging.getLogger(__name__)


class Refusals:
    """Counts of refused connections, by endpoint. May be used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, endpoint: str, why: object) -> None:
        """Somebody was refused there."""
        with self._lock:
            self._counts[endpoint] += 1
            times = self._counts[endpoint]
        if times & (times - 1) == 0:  # the first, the second, the fourth: a flood of them is not one in the log
            _log.warning(
                "%s: %s was refused: %s", endpoint, "a connection" if times == 1 else f"connection {times}", why
            )

    @property
    def counts(self) -> Mapping[str, int]:
        """Up to now."""
        with self._lock:
            return dict(self._counts)


refused = Refusals()
"""Of this process."""
