"""Collectives of this process that are under way, for a watcher outside: a rank that waits in one is not to blame."""

import itertools
import threading
import time
from collections.abc import Callable

from regrow.core.ids import Instant, Seconds

UNKNOWN = -1


class Flights:
    """Counts what was begun and is not done. From any thread.

    `show`: told how many there are, and which is the oldest.
    """

    def __init__(self) -> None:
        self.show: Callable[[int, str], None] | None = None
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._open: dict[int, str] = {}
        self._name = threading.local()
        self._blind = False
        self._idle: Seconds = 0.0
        self._idle_since: Instant | None = time.monotonic()
        """None while one is under way."""

    @property
    def blind(self) -> bool:
        """True if some collectives run where their end is not seen."""
        return self._blind

    def idle(self) -> Seconds:
        """For how long no collective was under way, since the process began; of two calls the difference counts."""
        with self._lock:
            since = self._idle_since
            return self._idle + (0.0 if since is None else time.monotonic() - since)

    def name(self, name: str) -> None:
        """Name the collective that the calling thread begins next."""
        self._name.text = name

    def begin(self) -> int:
        """A collective was submitted; returns its number for `end`."""
        name = getattr(self._name, "text", "")
        with self._lock:
            number = next(self._numbers)
            self._open[number] = name
            if len(self._open) == 1:
                if self._idle_since is not None:
                    self._idle += time.monotonic() - self._idle_since
                    self._idle_since = None
                self._tell()
        return number

    def end(self, number: int) -> None:
        """It is done, or has failed."""
        with self._lock:
            oldest = next(iter(self._open), None) == number
            self._open.pop(number, None)
            if not self._open and self._idle_since is None:
                self._idle_since = time.monotonic()
            if oldest:
                self._tell()

    def lose_sight(self) -> None:
        """Some collectives run where their end is not seen (on a GPU)."""
        if not self._blind:
            with self._lock:
                self._blind = True
                self._tell()

    def _tell(self) -> None:
        if self.show is not None:
            count = len(self._open)
            oldest = next(iter(self._open.values()), "")
            self.show(UNKNOWN if self._blind and count == 0 else count, oldest)


FLIGHT = Flights()
"""Of this process: it has one agent that watches it."""
