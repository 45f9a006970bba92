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
        self._blind = self._lost = False
        self._unseen = 0
        self._idle: Seconds = 0.0
        self._idle_since: Instant | None = time.monotonic()
        """None while one is under way."""

    @property
    def blind(self) -> bool:
        """True if some collectives run where their end is not seen."""
        return self._blind

    @property
    def unseen(self) -> int:
        """Number of collectives so far whose end is not seen."""
        return self._unseen

    @property
    def lost(self) -> bool:
        """True if nothing is known of the thread that trains: no collective is seen, and others may be under way."""
        with self._lock:
            return self._lost and not self._open

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
                self._notify()
        return number

    def end(self, number: int) -> None:
        """It is done, or has failed."""
        with self._lock:
            oldest = next(iter(self._open), None) == number
            self._open.pop(number, None)
            if not self._open and self._idle_since is None:
                self._idle_since = time.monotonic()
            if oldest:
                self._notify()

    def lose_sight(self) -> None:
        """A collective is begun where its end is not seen (on a GPU)."""
        with self._lock:
            self._blind = True
            self._unseen += 1
            if not self._lost:
                self._lost = True
                self._notify()

    def regain_sight(self, unseen: int) -> None:
        """The first `unseen` of those whose end is not seen are done; nothing changes if there are more."""
        with self._lock:
            if self._lost and unseen == self._unseen:
                self._lost = False
                self._notify()

    def _notify(self) -> None:
        if self.show is not None:
            count = len(self._open)
            oldest = next(iter(self._open.values()), "")
            self.show(UNKNOWN if self._lost and count == 0 else count, oldest)


FLIGHT = Flights()
"""Of this process: it has one agent that watches it."""
