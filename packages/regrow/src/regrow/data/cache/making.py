"""Chooses the next entries of a producer, has them made, and puts them into the cache."""

import logging
import time
from collections import deque
from collections.abc import Collection
from functools import partial

from regrow.core.errors import CacheUnusable, NoRoom, NotCacheable, RegrowError, Unfit
from regrow.core.ids import Instant, Seconds
from regrow.core.messages.data import CacheSettings
from regrow.data.cache.batch_maker import BatchMaker, Drafting, Made, Missed
from regrow.data.cache.entry import encode
from regrow.data.cache.entry_store import EntryStore
from regrow.data.cache.identity import Identity, described, difference
from regrow.data.cache.layout import Draft, Key
from regrow.data.cache.messages import At, Hello, ShareGroup, Want
from regrow.data.described import CachedLoader, cached_loader

_GRACE_S: Seconds = 30.0
"""Time for which a group without readers keeps its loader workers: its reader is probably being replaced."""
_PLAN = 256
"""Number of entries planned at a time, because planning is expensive: it considers all entries ahead."""
_PLAN_S: Seconds = 0.05
"""Least time between two plans, unless a reader waits."""
_CHECK_S: Seconds = 1.0
"""Interval of checks that loader workers without output are alive."""
_LARGER = 1.5

_NO_ROOM = "the cache has no room for what its readers need at the same time"
_log = logging.getLogger("regrow")


class _Served:
    """Shares that are, or were, read together. `at`: next entry of each; `left`: time at which the last reader left."""

    def __init__(self, maker: BatchMaker) -> None:
        self.maker = maker
        self.at: list[Key] = []
        self.left: Instant | None = None
        self.failed: dict[Key, str] = {}
        self.planned: deque[Key] = deque()


class Making:
    """Makes the entries of one loader, in the order in which they are needed.

    Args:
        loader: the script's loader.
        settings: settings of the cache.
        alone: open files because of which several processes should not read the data set, unless `num_workers` is set.
    """

    def __init__(self, loader: object, settings: CacheSettings, *, alone: list[str]) -> None:
        self._script_loader = loader
        self._settings = settings
        self._alone = alone
        self._loader: CachedLoader | None = None
        self._identity = Identity(b"", {})
        self._entry_store: EntryStore | None = None
        self._until = 0
        self._served: dict[ShareGroup, _Served] = {}
        self._wants: set[Key] = set()
        self._stale = True
        """True if something has changed since the last plan."""
        self._planned_at: Instant = 0.0
        self._checked_at: Instant = 0.0
        self.refusal = ""
        """Reason why this producer will never make entries again; empty if it still makes them."""
        self.slowest: Seconds = 0.0
        """Longest time that an entry took, from the start of its batch to its file."""

    def check(self, hello: Hello) -> None:
        """Check a worker that has connected. Raises `Unfit` if the batches made here are not that worker's batches."""
        if self._loader is None and not self.refusal:
            self._open(hello.seed)
        if self.refusal:
            raise Unfit(self.refusal)
        if hello.identity != self._identity.value:
            words = "; ".join(difference(self._identity.parts, hello.parts))
            raise Unfit(f"what the script has made for the producer is not what it has made for this worker: {words}")
        self._until = max(self._until, hello.until)

    def _open(self, seed: int) -> None:
        try:
            loader = cached_loader(self._script_loader, seed=seed)
            if loader is None or not loader.map_style:
                self.refusal = "its batches cannot be made ahead"
                return
            self._identity = described(loader)
            self._entry_store = EntryStore(self._settings, self._identity.value)
            self._loader = loader
        except RegrowError as error:
            self.refusal = str(error)

    # --- readers -------------------------------------------------------------------------------------------------

    def stand(self, positions: Collection[At], wants: Collection[Want]) -> None:
        """Update the positions of all readers, and the entries that they wait for."""
        now = time.monotonic()
        for message in (*positions, *wants):
            if message.group not in self._served and self._loader is not None:
                self._served[message.group] = _Served(self._maker_for(self._loader, message.group))
        worlds = {message.key.shares for message in positions}
        wanted = {message.group for message in wants}
        read = {(share, message.key.shares) for message in positions for share in message.group.shares}
        for group, served in self._served.items():
            at = [key for message in positions if message.group == group for key in _next_of_each_share(message)]
            if at:
                served.at, served.left = at, None
                first = min(at)
                served.failed = {key: why for key, why in served.failed.items() if key >= first}
            elif group in wanted:
                served.left = None  # a newcomer of the next world size is warming up
            elif worlds and (group.of not in worlds or all((share, group.of) in read for share in group.shares)):
                served.left = now - _GRACE_S  # the world has another size now
            elif served.left is None:
                served.left = now
        self._wants = {message.key for message in wants}
        self._stale = True

    def try_again(self, key: Key) -> None:
        """Forget that this entry could not be made, because a reader requests it again."""
        for served in self._served.values():
            served.failed.pop(key, None)

    def _maker_for(self, loader: CachedLoader, group: ShareGroup) -> BatchMaker:
        workers = loader.loader.num_workers
        if workers == 0 and (group.of > len(group.shares) or self._served):
            if not self._alone:
                workers = 1  # without a cache the ranks would make their batches in parallel too
            elif not self._served:
                _log.warning(
                    "batches are made one after another, since loader workers would share what the data set reads "
                    "by (%s): num_workers=1 makes them side by side, if the data set bears it",
                    ", ".join(self._alone),
                )
        drafting = None if self._entry_store is None else Drafting(self._entry_store.folder.path, self._identity.value)
        return BatchMaker(loader.loader, seed=loader.seed, workers=workers, drafting=drafting)

    def _readers(self) -> list[Key]:
        return [key for served in self._served.values() for key in served.at]

    # --- making --------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """True if `make` has work to do."""
        makers = [(served.maker, served.planned) for served in self._served.values()]
        return any(maker.ready or (planned and maker.has_room) for maker, planned in makers)

    @property
    def descriptors(self) -> set[int]:
        """Descriptors that become readable when `make` has new work."""
        found = (served.maker.descriptor for served in self._served.values())
        return {descriptor for descriptor in found if descriptor is not None}

    @property
    def rest(self) -> Seconds | None:
        """Time until `make` has work again, unless a message arrives earlier; None: only after a message."""
        if not self._stale or any(served.planned for served in self._served.values()) or not self._served:
            return None  # planned entries start when a loader worker is free; the next plan follows only then
        return max(0.0, self._planned_at + _PLAN_S - time.monotonic())

    def has(self, key: Key) -> bool:
        """True if the entry is in the cache."""
        return self._entry_store is not None and self._entry_store.has(key)

    def failed(self, key: Key) -> str | None:
        """Reason why the entry could not be made; None if it was made, or not tried."""
        return next((served.failed[key] for served in self._served.values() if key in served.failed), None)

    def make(self) -> list[Key]:
        """Make an entry, if one is needed; returns the keys of entries that have become ready or have failed."""
        try:
            return self._make()
        except (NoRoom, CacheUnusable) as error:
            self._refuse(str(error))
            return []

    def close(self) -> None:
        """End all loader workers."""
        for served in self._served.values():
            served.maker.close()
        self._served.clear()

    def _make(self) -> list[Key]:
        self._leave()
        news = self._plan()
        news += self._fill()
        ready = [group for group, served in self._served.items() if served.maker.ready]
        side_by_side = [group for group in ready if self._served[group].maker.workers]
        # At most one batch is made in this process before messages are read again.
        for group in side_by_side or sorted(ready, key=self._urgency)[:1]:
            news += self._take(group)
            if self.refusal:
                return news
        now = time.monotonic()
        if not ready and now - self._checked_at > _CHECK_S:
            self._checked_at = now
            for group, served in self._served.items():
                news += self._missed(group, served.maker.check())
        return news

    def _fill(self) -> list[Key]:
        missed: list[Key] = []
        for group, served in self._served.items():
            missed += self._missed(group, served.maker.fill(partial(self._next_of, served.planned)))
        return missed

    def _urgency(self, group: ShareGroup) -> tuple[bool, int, ShareGroup]:
        """Sort key of groups of shares: first those with a waiting reader, then the most urgent."""
        served = self._served[group]
        first = min(served.maker.underway)
        distance = first.step - min((key.step for key in served.at), default=first.step)
        return first not in self._wants, distance, group

    def _leave(self) -> None:
        now = time.monotonic()
        for group, served in list(self._served.items()):
            if served.left is not None and now - served.left >= _GRACE_S:
                served.maker.close()
                del self._served[group]
                self._stale = True

    def _plan(self) -> list[Key]:
        """Plan the next entries, if none are planned, or a reader waits for an entry that is not planned.

        Returns the entries for which readers wait in vain.
        """
        underway = [key for served in self._served.values() for key in served.maker.underway]
        first = {served.planned[0] for served in self._served.values() if served.planned}
        waiting = self._wants - set(underway) - first
        if (
            self._entry_store is None
            or not self._served
            or not (waiting or (not first and self._stale and not self.rest))
        ):
            return []
        for served in self._served.values():
            served.planned.clear()
        failed = {key for served in self._served.values() for key in served.failed}
        make = self._entry_store.plan(
            self._readers(),
            until=self._until,
            limit=_PLAN,
            wants=[key for key in self._wants if key not in failed],
            underway=underway,
            failed=failed,
        )
        for key in make:
            maker = self._maker_of(key)
            # Entries after a sample that cannot be read will hardly be needed.
            if maker is not None and (not maker.failed or key in self._wants):
                maker.planned.append(key)
        for group, served in self._served.items():
            if len(group.shares) > 1:  # a share that its reader has passed is needed again in the next step
                served.planned = deque(sorted(served.planned, key=lambda key: (key not in self._wants, key.step)))
        self._stale, self._planned_at = False, time.monotonic()
        in_vain = self._wants - failed - set(make) - set(underway)
        for key in in_vain:
            if not self.has(key) and (maker := self._maker_of(key)) is not None:
                maker.failed[key] = _NO_ROOM
        return list(in_vain)

    def _maker_of(self, key: Key) -> _Served | None:
        """The group that makes an entry, preferably one with a reader; None if there is none."""
        found = (served for group, served in self._served.items() if group.has(key))
        return min(found, key=lambda served: served.left is not None, default=None)

    def _next_of(self, planned: deque[Key]) -> Key | None:
        """The next planned entry of a group that no worker has made itself."""
        while self._entry_store is not None and planned:
            key = planned.popleft()
            if not self._entry_store.has(key):
                return key
            self._entry_store.folder.refresh()
            self._stale = True
        return None

    def _take(self, group: ShareGroup) -> list[Key]:
        began = time.monotonic()
        made = self._served[group].maker.take()
        if isinstance(made, list):
            return self._missed(group, made)
        self._store(made.key, made)
        self.slowest = max(self.slowest, made.seconds + time.monotonic() - began)
        return [made.key]

    def _store(self, key: Key, made: Made) -> None:
        if self._entry_store is None:
            return
        entry = made.batch
        try:
            if not isinstance(entry, Draft):
                entry = encode(entry, identity=self._identity.value, key=key, samples=made.samples)
        except NotCacheable as error:
            self._refuse(f"its batches cannot be kept: {error.reason}")
            return
        if entry.nbytes > _LARGER * self._entry_store.estimate:
            for served in self._served.values():
                served.planned.clear()  # planned with a smaller estimate
            self._planned_at = 0.0
        self._entry_store.put(entry, self._readers(), until=self._until)
        self._stale = True

    def _missed(self, group: ShareGroup, missed: list[Missed]) -> list[Key]:
        served = self._served[group]
        for key, reason in missed:
            served.failed[key] = reason
            served.planned.clear()
            self._stale = True
        return [key for key, _ in missed]

    def _refuse(self, reason: str) -> None:
        self.refusal = reason
        self.close()


def _next_of_each_share(message: At) -> list[Key]:
    """The next entry of each of a reader's shares, as if each share had a reader of its own."""
    shares = message.group.shares
    now = shares.index(message.key.share)
    return [message.key._replace(step=message.key.step + (at < now), share=share) for at, share in enumerate(shares)]
