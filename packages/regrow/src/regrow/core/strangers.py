"""Refused connections and requests of callers outside the job: counted, and logged ever less often."""

import logging
import threading
from collections import Counter
from collections.abc import Mapping
from typing import Final

from regrow.core.ids import Seconds

MOST: Final = 64
"""Most callers at one endpoint that may be unidentified at the same time."""
HELLO_S: Final[Seconds] = 5.0
"""Longest time for a caller to identify itself."""
TURN_S: Final[Seconds] = 0.25
"""Shortest time that each caller gets, however many others wait: on a busy node it needs part of this time."""
_log = logging.getLogger(__name__)


class Refusals:
    """Counts of refused connections, by endpoint. May be used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, endpoint: str, why: object) -> None:
        """Count a refusal at this endpoint, and log the first, second, fourth, eighth and so on."""
        with self._lock:
            self._counts[endpoint] += 1
            times = self._counts[endpoint]
        if times & (times - 1) == 0:  # powers of two, so that a flood of refusals does not flood the log
            _log.warning(
                "%s: %s was refused: %s", endpoint, "a connection" if times == 1 else f"connection {times}", why
            )

    @property
    def counts(self) -> Mapping[str, int]:
        """Number of refusals so far, by endpoint."""
        with self._lock:
            return dict(self._counts)


refused = Refusals()
"""The refusals of this process."""
