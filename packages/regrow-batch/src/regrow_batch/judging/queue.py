"""Rows in hand that no worker has: those that are ready, those that wait for their time, and those that come last."""

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice

from regrow.core.ids import Instant
from regrow_batch.judging.evidence import Hand

LEAST_READY = 256
_LOOK_ROWS = 256
NEVER: Instant = float("inf")


class Queue:
    """The waiting rows.

    Args:
        give: assigns rows to workers that have room.
    """

    def __init__(self, give: Callable[[], None]) -> None:
        self.give = give
        self.wake = asyncio.Event()
        self.ready: deque[Hand] = deque()
        self.last: deque[Hand] = deque()
        """Rows that must have no row beside them, sent when all others are done."""
        self._later: list[tuple[Instant, int, Hand]] = []
        self._drawn = 0
        self.bytes = 0
        """Total size of all rows in hand."""

    def __len__(self) -> int:
        return len(self.ready) + len(self._later) + len(self.last)

    @property
    def only_last(self) -> bool:
        """True if only rows of `last` wait."""
        return not self.ready and not self._later

    @property
    def next_at(self) -> Instant:
        """Time when the next row is due."""
        return self._later[0][0] if self._later else NEVER

    def at_once(self, hand: Hand) -> None:
        """Put a row before the others."""
        (self.last if hand.alone else self.ready).appendleft(hand)
        self.wake.set()

    def later(self, hand: Hand, at: Instant) -> None:
        """Put a row back at time `at`."""
        self._drawn += 1
        heapq.heappush(self._later, (at, self._drawn, hand))
        self.wake.set()

    def come_due(self, now: Instant) -> None:
        """Make the rows ready whose time has come."""
        while self._later and self._later[0][0] <= now:
            hand = heapq.heappop(self._later)[2]
            (self.last.append if hand.alone else self.ready.appendleft)(hand)

    def next(self, blocked: set[object], suits: Callable[[bytes], bool]) -> int | None:
        """Index of the first ready row whose prefix suits; if none of the first rows does, of the first; None: no row.

        Args:
            blocked: results of `alike`; such rows are skipped.
            suits: true if a prefix's preferred worker has room.
        """
        first = None
        for at, hand in self._looked_at(blocked):
            if suits(hand.row.prefix):
                return at
            first = at if first is None else first
        return first

    def _looked_at(self, blocked: set[object]) -> Iterator[tuple[int, Hand]]:
        for at, hand in enumerate(islice(self.ready, _LOOK_ROWS)):
            if not blocked or alike(hand) not in blocked:
                yield at, hand


def alike(hand: Hand) -> object:
    """Key that is equal for rows that may go to the same workers."""
    return hand.row.kind, frozenset(hand.avoided), frozenset(hand.met)
