"""Failures of newcomers for a lost rank: the pauses between attempts, and their end. Pure."""

from collections import Counter

from regrow.core.ids import Instant, Rank, Seconds
from regrow.core.messages.vocabulary import ErrorReport

ATTEMPTS = 3
"""Number of newcomers in a row that may die before they are built; then no more are started in the same place."""
MOST_PAUSE_S: Seconds = 30.0
"""Longest pause between two attempts, by the end of which a busy file server may answer."""


class Newcomers:
    """Attempts to fill lost ranks since the last generation was formed."""

    def __init__(self) -> None:
        self._failed: Counter[Rank] = Counter()
        self._erred: Counter[Rank] = Counter()
        self._next: dict[Rank, Instant] = {}
        self.errors: dict[Rank, ErrorReport] = {}
        """The last error of a newcomer for each rank."""

    def failed(self, rank: Rank, error: ErrorReport | None, now: Instant) -> None:
        """Count a newcomer that died before it joined the world. After errors the next one waits, longer each time."""
        self._failed[rank] += 1
        if error is not None:
            self._erred[rank] += 1
            self.errors[rank] = error
            self._next[rank] = now + min(MOST_PAUSE_S, 2.0 ** (self._erred[rank] - 1))

    def move(self, rank: Rank) -> None:
        """Try the next newcomer for this rank on another node, if one has room."""
        self._failed[rank] = max(self._failed[rank], ATTEMPTS)

    def stood(self) -> None:
        """Forget all failures, because a generation has formed."""
        self._failed.clear()
        self._erred.clear()
        self._next.clear()
        self.errors.clear()

    def at_home(self, rank: Rank) -> bool:
        """True if the next newcomer for this rank is tried on the rank's own node."""
        return self._failed[rank] < ATTEMPTS

    @property
    def die(self) -> bool:
        """True if several newcomers in a row have died for some rank."""
        return any(times >= ATTEMPTS for times in self._failed.values())

    def hopeless(self, rank: Rank, *, elsewhere: bool) -> bool:
        """True if no further newcomer is tried for the rank. `elsewhere`: another node has room for it."""
        return self._erred[rank] >= (2 * ATTEMPTS if elsewhere else ATTEMPTS)

    def times(self, rank: Rank) -> int:
        """Number of newcomers that have failed for the rank."""
        return self._failed[rank]

    def pause(self, rank: Rank, now: Instant) -> bool:
        """True if it is too early to start the next newcomer for the rank."""
        return now < self._next.get(rank, now)

    def next_try(self) -> Instant | None:
        """Earliest time at which another newcomer is to be tried for a rank; None: no rank has to wait."""
        return min(self._next.values(), default=None)

    def tried(self, rank: Rank) -> None:
        """End the rank's pause, because another newcomer was started for it."""
        self._next.pop(rank, None)

    def due(self, now: Instant) -> None:
        """Drop pauses that are over, even if no newcomer can be tried yet because some survivors still halt."""
        self._next = {rank: at for rank, at in self._next.items() if at > now}
