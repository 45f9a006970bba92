"""Keeps the entries of one identity within the cache's budget, while other processes read and write."""

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
"""Interval at which the size of the entries of the job's other loaders is measured."""
_SPARED = 0.75
"""Fraction to which the entries are reduced if the file system is full before the budget is used up."""


class EntryStore:
    """Puts entries into the cache and makes room for them. Not thread-safe.

    Entries of step 0 stay after all readers have passed them: the replacement of a lost worker rehearses with them.

    Args:
        settings: the cache. Its budget is for all loaders together.
        identity: identity of the loader whose entries these are.

    Raises `CacheUnusable` if the folder cannot be read.
    """

    def __init__(self, settings: CacheSettings, identity: bytes) -> None:
        self.folder = CacheFolder(Path(settings.folder), identity, settings.budget)
        self._keeping = Keeping(settings.budget)
        self._budget = settings.budget
        self._others = 0
        self._others_at: Instant | None = None
        self.estimate = max(self.folder.entries.values(), default=0)
        """Estimated size in bytes of an entry that is not made yet."""

    def has(self, key: Key) -> bool:
        """True if the entry exists now."""
        if self.folder.path_of(key).exists():
            return True
        self.folder.evict([key])  # this also removes the key from the list of entries
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
        """Make room; returns the entries to make next, most urgent first. Raises `CacheUnusable`.

        Args:
            readers: position of each reader.
            until: steps of the whole training.
            limit: most entries to return.
            wants: entries that readers wait for.
            underway: entries that are being made.
            failed: entries that cannot be made.
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
        """Write an entry, or publish a draft.

        Raises `NoRoom` if evicting unneeded entries does not make enough room, or `CacheUnusable`.

        spare: drop the entry if the budget has no room for it, because no reader waits for it.
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
