"""What another node should keep of this one's entries: those that are needed soonest. Pure."""

import heapq
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from regrow.core.data_messages import REHEARSED
from regrow.data.cache.layout import Key


class Offer(NamedTuple):
    """An entry that could be kept elsewhere too."""

    identity: bytes
    key: Key
    path: Path
    nbytes: int


_At = tuple[bytes, Key]


class Offers:
    """What there is, and what the mirror has of it. Steps that all readers have passed are of no use to anybody."""

    def __init__(self) -> None:
        self._known: dict[_At, Offer] = {}
        self._sent: set[_At] = set()
        self._waiting: list[tuple[int, int, _At]] = []
        """A heap by step and share; with some that were sent, or are gone, meanwhile."""
        self._keep_from: dict[bytes, int] = {}
        self._had: dict[_At, int] = {}
        """What the mirror had before anything was sent, and its bytes."""
        self.sent_bytes = 0
        """What the mirror has."""

    def add(self, offer: Offer) -> None:
        """There is a new entry, or one that was made again."""
        if REHEARSED < offer.key.step < self.keep_from(offer.identity):
            return
        at = (offer.identity, offer.key)
        self._forget(at)
        self._known[at] = offer
        if self._had.pop(at, None) == offer.nbytes:
            self.sent(offer)
        else:
            heapq.heappush(self._waiting, (offer.key.step, offer.key.share, at))

    def knows(self, identity: bytes, key: Key) -> bool:
        """Whether it need not be added: it has been, or it is of a step that was passed."""
        return (identity, key) in self._known or REHEARSED < key.step < self.keep_from(identity)

    @property
    def identities(self) -> list[bytes]:
        """Whose entries have been spoken of."""
        return list(self._keep_from)

    def passed(self, identity: bytes, keep_from: int) -> None:
        """Entries of older steps are needed no more, but for those of the first."""
        if keep_from == self._keep_from.get(identity):
            return
        self._keep_from[identity] = keep_from
        for at in [at for at in self._known if at[0] == identity and REHEARSED < at[1].step < keep_from]:
            self._forget(at)

    def keep_from(self, identity: bytes) -> int:
        """The oldest step that is still needed."""
        return self._keep_from.get(identity, 0)

    def next(self, budget: int) -> Offer | None:
        """What the mirror should get now, so that it has no more than `budget` bytes; None: nothing, for now."""
        while self._waiting:
            at = self._waiting[0][2]
            offer = self._known.get(at)
            if offer is not None and at not in self._sent:
                return offer if self.sent_bytes + offer.nbytes <= budget else None
            heapq.heappop(self._waiting)
        return None

    def sent(self, offer: Offer) -> None:
        """The mirror has it."""
        at = (offer.identity, offer.key)
        if self._known.get(at) == offer and at not in self._sent:
            self._sent.add(at)
            self.sent_bytes += offer.nbytes

    def gone(self, offer: Offer) -> None:
        """The entry is not there any more."""
        if self._known.get((offer.identity, offer.key)) == offer:
            self._forget((offer.identity, offer.key))

    def start_again(self, had: Mapping[tuple[bytes, Key], int]) -> None:
        """There is another mirror. `had`: what it has of this node, and its bytes; an agent before this one left it."""
        self._sent.clear()
        self._waiting.clear()
        self.sent_bytes = 0
        self._had = dict(had)
        for offer in list(self._known.values()):
            self.add(offer)

    def _forget(self, at: _At) -> None:
        known = self._known.pop(at, None)
        if known is not None and at in self._sent:
            self._sent.discard(at)
            self.sent_bytes -= known.nbytes
