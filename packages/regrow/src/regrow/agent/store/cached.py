"""Cache of keys whose homes are other agents, with the holders of copies of them. No value is ever stale.

A copy is given out only together with an entry in `holders`, and the home of a key changes its value only after every
holder, and each holder's own holders, confirmed that they forgot it (`StoreNode`). A value that was requested before
the order to forget it and arrives after the order (`Fetch.spoiled`) serves readers that asked before, and is not kept.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

from regrow.core.ids import Instant
from regrow.core.process.tasks import shared

_LIMIT = 256 << 20
FetchKey = tuple[str, bool, bool]


class Found(NamedTuple):
    """Result of a read. `value`: None if only a queue of that name exists. `keep`: True if it may be cached."""

    value: bytes | None
    keep: bool


class Fetch:
    """One request to the next agent, shared by all readers that arrive while it is under way.

    Args:
        key: the key, whether the request waits for it, and whether a queue of that name is enough.
        until: time at which the request is given up.
    """

    def __init__(self, key: FetchKey, until: Instant) -> None:
        self.key = key
        self.until = until
        self.sent = False
        """True once sent: later readers may use the answer only if it may be cached; it may be too old for them."""
        self.spoiled = False
        self.forgotten: set[str] = set()
        """Other keys that had to be forgotten since the request; their values in the answer must not be kept."""
        self.withdrawn = False
        self._readers = 0
        self._task: asyncio.Task[Found | None] | None = None

    def start(self, ask: Callable[["Fetch"], Coroutine[Any, Any, Found | None]], over: Callable[[], None]) -> None:
        """Begin in the next turn of the loop, so that readers of this turn join before it is sent; `over` ends it."""
        self._task = shared(ask(self))
        self._task.add_done_callback(lambda _: over())

    async def result(self, within: float) -> Found | None:
        """The value that was found, or None if it did not arrive in time. Raises the error of the request.

        The request is withdrawn when its last reader has left.
        """
        if self._task is None:
            return None
        self._readers += 1
        try:
            await asyncio.wait({self._task}, timeout=within)
            return self._task.result() if self._task.done() and not self._task.cancelled() else None
        finally:
            self._readers -= 1
            if not self._readers:
                self.cancel()

    def spoil(self) -> None:
        """Mark the value on its way as one that must not be kept."""
        self.spoiled = True

    def cancel(self) -> None:
        """Give up the request, even if readers wait."""
        self.withdrawn = True
        if self._task is not None:
            self._task.cancel()


class CachedValues:
    """Cached copies, their holders, and the requests under way."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._holders: dict[str, set[str]] = {}
        self._fetches: dict[FetchKey, Fetch] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: str) -> bytes | None:
        """The cached value of a key; None if there is none."""
        return self._values.get(key)

    def keep(self, key: str, value: bytes) -> None:
        """Cache a value, if there is room."""
        self._drop(key)
        if self._bytes + len(value) <= _LIMIT:
            self._values[key] = value
            self._bytes += len(value)

    def note(self, key: str, holder: str) -> None:
        """Note that `holder` is being given a copy of the key's value."""
        self._holders.setdefault(key, set()).add(holder)

    def is_held(self, key: str) -> bool:
        """True if any agent or worker was given a copy of the key's value."""
        return key in self._holders

    def fetch(self, key: FetchKey) -> Fetch | None:
        """The request under way that a new reader may join; None: there is none."""
        fetch = self._fetches.get(key)
        return fetch if fetch is not None and not fetch.withdrawn else None

    def begin(self, fetch: Fetch) -> None:
        """Let new readers join this request from now on."""
        self._fetches[fetch.key] = fetch

    def end(self, fetch: Fetch) -> None:
        """Let no more readers join this request, which is answered or given up."""
        if self._fetches.get(fetch.key) is fetch:
            del self._fetches[fetch.key]

    def forget(self, key: str) -> set[str]:
        """Forget a key and spoil requests for it; returns the holders that must forget the key too."""
        self._drop(key)
        for waits in (False, True):
            for queue in (False, True):
                fetch = self._fetches.pop((key, waits, queue), None)
                if fetch is not None:
                    fetch.spoil()
        for fetch in self._fetches.values():
            fetch.forgotten.add(key)
        return self._holders.pop(key, set())

    def restore(self, key: str, holders: set[str]) -> None:
        """Enter holders again, as they may not have forgotten the key."""
        if holders:
            self._holders.setdefault(key, set()).update(holders)

    def drop(self, is_old: Callable[[str], bool]) -> None:
        """Forget keys of generations that are over. Holders are not informed, as these keys are refused anyway."""
        for key in [key for key in self._values if is_old(key)]:
            self._drop(key)
        for key in [key for key in self._holders if is_old(key)]:
            del self._holders[key]
        for fetch in [fetch for (key, _, _), fetch in self._fetches.items() if is_old(key)]:
            fetch.cancel()

    def _drop(self, key: str) -> None:
        value = self._values.pop(key, None)
        if value is not None:
            self._bytes -= len(value)
