"""The operator as it runs, with its queue, watches and pauses, on a loop that sleeps for no time at all."""

import asyncio
import selectors
from collections.abc import AsyncIterator, Callable
from typing import Any

from tests.cluster.fake_store import FakeStore, Manifest
from tests.cluster.scheduled_operator import KEY, StoreApi

from regrow_clusters.operator.api import ApiKind
from regrow_clusters.operator.controller import Controller


class _Skipping(selectors.PollSelector):
    """Nothing is waited for: the time that it would have taken has passed."""

    def __init__(self) -> None:
        super().__init__()
        self.passed = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(0)
        if not found and timeout is not None:
            self.passed += max(timeout, 0.0)
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop whose time passes when nothing is to be done."""

    def __init__(self) -> None:
        self._skipping = _Skipping()
        super().__init__(self._skipping)

    def time(self) -> float:
        """Seconds that were slept."""
        return self._skipping.passed


class _LiveApi(StoreApi):
    """With watches that stay, and lists that count as well."""

    def __init__(self, store: FakeStore) -> None:
        super().__init__(store)
        self._live = store

    async def list(self, kind: ApiKind) -> tuple[list[Manifest], str]:
        self.calls += 1
        return await super().list(kind)

    async def watch(self, kind: ApiKind, version: str) -> AsyncIterator[tuple[str, Manifest]]:
        news, heard = asyncio.Event(), int(version)

        def wake(change: Any) -> None:
            news.set()

        self._live.listeners.append(wake)
        try:
            while True:
                news.clear()
                for change in self._live.since(heard):
                    heard = change.version
                    if change.plural == kind:
                        yield change.what, change.new
                await news.wait()
        finally:
            self._live.listeners.remove(wake)


async def calls_while(store: FakeStore, turn: Callable[[], None], *, minutes: int) -> int:
    """Calls of the API server by one operator in that time, after its first minute. Needs a `VirtualLoop`.

    `turn`: everybody else's, every 5 s.
    """
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    offset, before = store.wall() - loop.time(), store.wall
    store.wall = lambda: offset + loop.time()
    api = _LiveApi(store)
    running = asyncio.create_task(Controller(api, KEY, wall=store.wall).run())
    try:
        await asyncio.sleep(60.0)
        first = api.calls
        for _ in range(12 * minutes):
            await asyncio.sleep(5.0)
            turn()
        assert not running.done(), "the operator has ended"
        return api.calls - first
    finally:
        running.cancel()
        await asyncio.wait({running})
        store.wall = before
