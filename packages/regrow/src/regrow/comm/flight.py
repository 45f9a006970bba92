"""Collectives of this process in flight, shown to an outside watcher: a rank that waits in one is not to blame."""

import itertools
import threading
import time
from collections.abc import Callable

from regrow.core.ids import Instant, Seconds

UNKNOWN = -1


class Flights:
    """Counts collectives that have begun and not ended; may be called from any thread.

    `show`: called with their number, and the name of the oldest.
    """

    def __init__(self) -> None:
        self.show: Callable[[int, str], None] | None = None
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._open: dict[int, str] = {}
        self._name = threading.local()
        self._unseen_open = False
        self._unseen = 0
        self._idle: Seconds = 0.0
        self._idle_since: Instant | None = time.monotonic()
        """Time since which no collective is in flight; None while one is."""

    @property
    def any_unseen(self) -> bool:
        """True if this process has begun collectives whose end it cannot see (on a GPU)."""
        return self._unseen > 0

    @property
    def unseen(self) -> int:
        """Number of collectives begun so far whose end this process cannot see."""
        return self._unseen

    @property
    def only_unseen(self) -> bool:
        """True if the training thread's state is unknown: only collectives whose end is invisible may be in flight."""
        with self._lock:
            return self._unseen_open and not self._open

    def idle(self) -> Seconds:
        """Total time without a collective in flight since the process began; only differences are meaningful."""
        with self._lock:
            since = self._idle_since
            return self._idle + (0.0 if since is None else time.monotonic() - since)

    def name(self, name: str) -> None:
        """Name the collective that the calling thread begins next."""
        self._name.text = name

    def begin(self) -> int:
        """Note that a collective was submitted; returns its number for `end`."""
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
        """Note that collective `number` has finished or failed."""
        with self._lock:
            oldest = next(iter(self._open), None) == number
            self._open.pop(number, None)
            if not self._open and self._idle_since is None:
                self._idle_since = time.monotonic()
            if oldest:
                self._notify()

    def begin_unseen(self) -> None:
        """Note that a collective begins whose end this process cannot see (on a GPU)."""
        with self._lock:
            self._unseen += 1
            if not self._unseen_open:
                self._unseen_open = True
                self._notify()

    def end_unseen(self, unseen: int) -> None:
        """Note that the first `unseen` invisible collectives are done; has no effect if more have begun since."""
        with self._lock:
            if self._unseen_open and unseen == self._unseen:
                self._unseen_open = False
                self._notify()

    def _notify(self) -> None:
        if self.show is not None:
            count = len(self._open)
            oldest = next(iter(self._open.values()), "")
            self.show(UNKNOWN if self._unseen_open and count == 0 else count, oldest)


FLIGHT = Flights()
"""The collectives of this process, which its agent watches."""
