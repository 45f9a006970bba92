"""The entries of one identity, kept within the cache's budget while readers and writers go on."""

import time
from collections.abc import Collection, Mapping
from pathlib import Path

from regrow.core.errors import NoRoom
from regrow.core.ids import Instant, Seconds
from regrow.core.messages.data import CacheSettings
from regrow.data.cache.folder import CacheFolder
from regrow.data.cache.keeping import Keeping
from regrow.data.cache.layout import Draft, Encoded, Key, discard

_OTHERS_S: Seconds = 1.0
"""Interval of looks at the memory of the job's other loaders."""
_SPARED = 0.75
"""Part to which the entries are reduced if the file system is full before the budget is."""


class EntryStore:
    """Puts entries into the cache and makes room for them. For one thread.

    The first step's entries stay, though every reader has passed them: a worker that takes a lost one's place rehearses
    with them.

    Args:
        settings: the cache. Its budget is for all loaders together.
        identity: whose entries.

    Raises `CacheUnusable` where the folder cannot be read.
    """

    def __init__(self, settings: CacheSettings, identity: bytes) -> None:
        self.folder = CacheFolder(Path(settings.folder), identity, settings.budget)
        self._keeping = Keeping(settings.budget)
        self._budget = settings.budget
        self._others = 0
        self._others_at: Instant | None = None
        self.estimate = max(self.folder.entries.values(), default=0)
        """Bytes of an entry that is still to be made."""

    def has(self, key: Key) -> bool:
        """True if the entry is there now."""
        if self.folder.path_of(key).exists():
            return True
        self.folder.evict([key])  # from the books
        return False

    def plan(
        self,
        readers: Collection[Key],
        *,
        until: int,
        limit: int,
        wants: Collection[Key] = (),
        underway: Collection[Key] = (),
        failed: Collection[Key] = (),
    ) -> list[Key]:
        """Make room; returns what is to be made next, most urgent first. Raises `CacheUnusable`.

        Args:
            readers: where each stands.
            until: steps of the training in all.
            limit: how many to name at most.
            wants: what somebody waits for.
            underway: what is being made.
            failed: what cannot be made.
        """
        self.folder.refresh_at_times()
        there = self.folder.entries
        pinned = self._pinned(there, readers)
        known = {key: size for key, size in there.items() if key not in pinned} | dict.fromkeys(failed, 0)
        self._keeping.budget = max(0, self._budget - self._other_bytes() - sum(pinned.values()))
        decision = self._keeping.decide(
            readers, known, estimate=self.estimate, until=until, wants=wants, underway=underway, limit=limit
        )
        self.folder.evict(key for key in decision.evict if key in there)
        return decision.make

    def put(self, entry: Encoded | Draft, readers: Collection[Key], *, until: int, spare: bool = False) -> None:
        """Write an entry, or name a written one.

        Raises `NoRoom`, even after what nobody needs has gone, or `CacheUnusable`.

        spare: it may be left out where the budget has no room for it, as nobody waits for it.
        """
        self.estimate = entry.nbytes
        if self._excess(entry) > 0:
            self.plan(readers, until=until, limit=0, underway=[entry.key])
            if spare and self._excess(entry) > 0:
                if isinstance(entry, Draft):
                    discard(entry)
                return
        try:
            self.folder.put(entry)
        except NoRoom:
            before = self.folder.nbytes
            self._budget = int(before * _SPARED)
            self.plan(readers, until=until, limit=0, underway=[entry.key])
            if self.folder.nbytes == before or isinstance(entry, Draft):
                raise
            self.folder.put(entry)

    def _excess(self, entry: Encoded | Draft) -> int:
        return self.folder.nbytes + entry.nbytes - self._budget + self._other_bytes()

    def _pinned(self, there: Mapping[Key, int], readers: Collection[Key]) -> dict[Key, int]:
        at_start = {(key.share, key.shares) for key in readers if key.step == 0}
        worlds = {key.shares for key in readers}
        pinned = {
            key: size
            for key, size in there.items()
            if key.step == 0 and key.shares in worlds and (key.share, key.shares) not in at_start
        }
        return pinned if 2 * sum(pinned.values()) <= self._budget else {}

    def _other_bytes(self) -> int:
        now = time.monotonic()
        if self._others_at is None or now - self._others_at > _OTHERS_S:
            self._others, self._others_at = self.folder.other_bytes(), now
        return self._others
