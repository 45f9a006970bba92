"""Rows in hand that nobody has: those that are ready, those that wait for their time, and those that come last."""

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
    """The rows that wait.

    Args:
        give: gives them to workers that have room.
    """

    def __init__(self, give: Callable[[], None]) -> None:
        self.give = give
        self.wake = asyncio.Event()
        self.ready: deque[Hand] = deque()
        self.last: deque[Hand] = deque()
        """Those that go on with no row beside them, when all others are done."""
        self._later: list[tuple[Instant, int, Hand]] = []
        self._drawn = 0
        self.bytes = 0
        """Of all rows in hand."""

    def __len__(self) -> int:
        return len(self.ready) + len(self._later) + len(self.last)

    @property
    def only_last(self) -> bool:
        """True if only rows that come last wait."""
        return not self.ready and not self._later

    @property
    def next_at(self) -> Instant:
        """When the next is due."""
        return self._later[0][0] if self._later else NEVER

    def at_once(self, hand: Hand) -> None:
        """A row goes on before others."""
        (self.last if hand.alone else self.ready).appendleft(hand)
        self.wake.set()

    def later(self, hand: Hand, at: Instant) -> None:
        """A row goes on at some time."""
        self._drawn += 1
        heapq.heappush(self._later, (at, self._drawn, hand))
        self.wake.set()

    def come_due(self, now: Instant) -> None:
        """Let go on whose time has come."""
        while self._later and self._later[0][0] <= now:
            hand = heapq.heappop(self._later)[2]
            (self.last.append if hand.alone else self.ready.appendleft)(hand)

    def next(self, blocked: set[object], suits: Callable[[bytes], bool]) -> int | None:
        """The first ready row that can go where its prefix wants to; where none of many can, the first of all.

        Args:
            blocked: rows like these are passed over.
            suits: whether a prefix can go where it wants to.
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
    """Rows of which this is the same go to the same workers."""
    return hand.row.kind, frozenset(hand.avoided), frozenset(hand.met)
