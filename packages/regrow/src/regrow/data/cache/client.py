"""A worker's batches from its node's cache, or made by the worker itself if the cache is not available."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data._utils.pin_memory import pin_memory

from regrow.core.errors import CacheUnusable, Damaged, NoRoom, NotCacheable
from regrow.core.ids import WorkerId
from regrow.core.messages.data import CacheSettings, OrderSpec
from regrow.data.cache.ahead import Ahead
from regrow.data.cache.entry import Encoded, Entry, encode, open_entry
from regrow.data.cache.entry_store import EntryStore
from regrow.data.cache.identity import described
from regrow.data.cache.layout import Key
from regrow.data.cache.messages import Hello
from regrow.data.cache.reach import Reach, Reader
from regrow.data.described import CachedLoader
from regrow.data.fetched import Fetched, Source
from regrow.data.kept import Giving
from regrow.data.walks import Follower, ShareWalk, StepWalk, Walk

_log = logging.getLogger("regrow")


@dataclass(frozen=True)
class NodeCache:
    """A worker's access to the data cache of its node.

    socket_dir: folder of the producers' sockets. until: steps of the whole training. speaks: True if this worker prints
    warnings for its whole node. reader: the worker's interface for waiting.
    """

    settings: CacheSettings
    socket_dir: str
    worker: WorkerId
    until: int
    speaks: bool
    reader: Reader

    def source(self, loader: CachedLoader) -> Source:
        """A source of the loader's batches that uses the cache."""
        return CachedSource(loader, self)


@dataclass
class Counts:
    """Batches by origin. `served`: by the cache, `waited` of these after a request; `made`: in this process."""

    served: int = 0
    waited: int = 0
    made: int = 0
    damaged: int = 0


class CachedSource:
    """A loader's batches from the node's cache; missing ones are made by the producer, or in this process.

    Args:
        loader: the script's loader.
        cache: the cache of this node.
    """

    giving: Giving
    spec: OrderSpec

    def __init__(self, loader: CachedLoader, cache: NodeCache) -> None:
        self._loader, self._cache = loader, cache
        self._own: Source = loader.source()
        self._stopgap = self._own_alone()
        # An iterable cannot be read a second time, except for kept batches.
        self.giving = self._own.giving
        self.spec = loader.spec
        identity = described(loader)
        self._identity = identity.value
        self._folder = Path(cache.settings.folder) / self._identity.hex()
        self._ahead: Ahead[Key, Entry] = Ahead(self._look)
        self._entry_store: EntryStore | None = None
        self._keeps = True
        self._said = self._closed = False
        self._last: Key | None = None
        """Key of the entry that was fetched last."""
        self._walk: Walk = StepWalk()
        self._pins = loader.loader.pin_memory and torch.accelerator.is_available()
        self.counts = Counts()
        self._reach: Reach | None = None
        if loader.map_style:
            hello = Hello(cache.worker, self._identity, identity.parts, loader.seed, cache.until)
            self._reach = Reach(cache.socket_dir, cache.settings.folder, loader.number, hello, cache.reader)
            cache.reader.want_producer(loader.number)
        cache.reader.on_halt(self.wake)

    def follow(self, walk: Walk) -> None:
        """Expect requests in this order from now on."""
        if walk == self._walk:
            return
        self._walk = walk
        if self._reach is not None:
            self._reach.shares = walk.shares if isinstance(walk, ShareWalk) else ()
        for source in (self._own, self._stopgap):
            if isinstance(source, Follower):
                source.follow(walk)

    def seek(self, step: int, rank: int, world: int) -> None:
        """Open the entry of `step` in the background, and notify the producer that it is needed."""
        key = Key(step, rank, world)
        self._ahead.start(key)
        if not self._loader.map_style:
            return
        self._note(key)

    def fetch(self, step: int, rank: int, world: int) -> Fetched:
        """The batch of `step` for share `rank` of `world`; exceptions of the data set pass through.

        Raises `GenerationHalted` if the generation ends while this call waits for the producer.
        """
        key = Key(step, rank, world)
        last, self._last = self._last, key
        # In a world of another size the producer restarts, which takes longer than to make one batch here.
        jumped = last is not None and key not in (last, self._after(last))
        alone = jumped and self._cache.reader.moved
        fetched = self._from_cache(key) or (None if alone else self._asked_for(key))
        is_there = fetched is not None
        if fetched is None:
            fetched = self._made(key)
        self._note(key)
        # If this batch had to be made here, the next one is hardly in the cache.
        following = self._after(key)
        if is_there and self._cache.reader.stepping and following is not None and following.step < self._cache.until:
            self._ahead.start(following)
        return fetched

    def _after(self, key: Key) -> Key | None:
        """The next key on the walk; None if this key is not on the walk any more."""
        return Key(*self._walk.after(key)) if self._walk.passes(key) else None

    def wake(self) -> None:
        """Make a waiting `fetch` check if its batch is still needed. From any thread."""
        if self._reach is not None:
            self._reach.wake()

    def close(self) -> None:
        """Close the connection, and end the thread and loader workers. May be called twice."""
        if not self._closed:
            self._closed = True
            _log.info("loader %d: %s", self._loader.number, self.counts)
        self._ahead.close()
        if self._reach is not None:
            self._reach.close()
        self._stopgap.close()
        self._own.close()

    # --- from the cache ------------------------------------------------------------------------------------------

    def _look(self, key: Key) -> Entry | None:
        return open_entry(self._folder, key, self._identity)

    def _from_cache(self, key: Key) -> Fetched | None:
        try:
            entry = self._ahead.take(key) or self._look(key)
        except Damaged as error:
            self.counts.damaged += 1
            _log.info("an entry of the data cache is made anew: %s", error)
            return None
        except OSError as error:
            self._do_without(f"its files cannot be read: {error}")
            return None
        if entry is None:
            return None
        self.counts.served += 1
        return Fetched(self._pinned(entry.batch()), entry.samples, entry.digest)

    def _asked_for(self, key: Key) -> Fetched | None:
        """Request the entry from the producer and read it; None if the producer refuses or does not deliver."""
        reach = self._reach
        if reach is None or not self._keeps:
            return None
        if not reach.ask(key):
            if reach.refusal:
                self._say(f"workers make the batches of loader {self._loader.number} themselves: {reach.refusal}")
            return None
        fetched = self._from_cache(key)
        self.counts.waited += fetched is not None
        if self._stopgap is not self._own:
            self._own.close()  # loader workers of this process are not needed while there is a producer
        return fetched

    def _pinned(self, batch: Any) -> Any:
        return pin_memory(batch) if self._pins else batch  # type: ignore[no-untyped-call]

    def _note(self, key: Key) -> None:
        if self._reach is not None and self._keeps and self._cache.reader.stepping:
            self._reach.note(key)

    # --- made here -----------------------------------------------------------------------------------------------

    def _own_alone(self) -> Source:
        """The source of the few batches that are made here while no producer is available.

        It starts no loader workers, unless the loader has a `worker_init_fn`, which may set up what samples need.
        """
        plain = self._loader.loader
        if not self._loader.map_style or plain.num_workers == 0 or plain.worker_init_fn is not None:
            return self._own
        return self._loader.source(loader_workers=False)

    def _made(self, key: Key) -> Fetched:
        soon = self._keeps and self._reach is not None and self._reach.expected
        fetched = (self._stopgap if soon else self._own).fetch(*key)
        self.counts.made += 1
        if not self._keeps:
            return fetched
        try:
            encoded = encode(fetched.batch, identity=self._identity, key=key, samples=fetched.samples)
        except NotCacheable as error:
            self._do_without(f"its batches cannot be kept: {error.reason}")
            return fetched
        try:
            self._put(key, encoded)
        except (NoRoom, CacheUnusable) as error:
            self._do_without(str(error))
        return Fetched(fetched.batch, fetched.samples, encoded.digest)

    def _put(self, key: Key, encoded: Encoded) -> None:
        if self._entry_store is None:
            self._entry_store = EntryStore(self._cache.settings, self._identity)
        self._entry_store.folder.refresh_at_times()
        # The positions of the node's other ranks are not known here: assume this rank's position for all.
        shares = {other.share for other in self._entry_store.folder.entries if other.shares == key.shares}
        readers = [key._replace(share=share) for share in shares | {key.share}]
        self._entry_store.put(encoded, readers, until=self._cache.until, spare=True)

    def _do_without(self, why: str) -> None:
        """Make every batch in this process from now on, and warn once."""
        self._keeps = False
        self._say(f"training goes on without the data cache of loader {self._loader.number}: {why}")

    def _say(self, text: str) -> None:
        """Warn, but only about the first failure: later ones follow from it."""
        if self._cache.speaks and not self._said:
            self._said = True
            _log.warning("%s", text)
