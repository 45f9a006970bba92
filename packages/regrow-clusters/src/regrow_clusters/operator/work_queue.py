"""Queue of the jobs to be reconciled: each at most once at a time, now or at a set time."""

import asyncio

from regrow.core.ids import Seconds
from regrow_clusters.operator.cache import JobKey

_FIRST_PAUSE: Seconds = 0.2
_LONGEST_PAUSE: Seconds = 60.0


class WorkQueue:
    """Keys in the order of their requests; a key that is requested while it is worked on is queued again."""

    def __init__(self) -> None:
        self._waiting: dict[JobKey, None] = {}
        self._busy: set[JobKey] = set()
        self._again: set[JobKey] = set()
        self._timers: dict[JobKey, asyncio.TimerHandle] = {}
        self._failures: dict[JobKey, int] = {}
        self._news = asyncio.Event()

    def add(self, key: JobKey) -> None:
        """Queue a job now."""
        if key in self._busy:
            self._again.add(key)
        else:
            self._waiting[key] = None
            self._news.set()

    def add_later(self, key: JobKey, within: Seconds) -> None:
        """Queue a job after this time, unless an earlier time is set."""
        loop = asyncio.get_running_loop()
        timer = self._timers.get(key)
        if timer is not None and not timer.cancelled() and loop.time() < timer.when() <= loop.time() + within:
            return
        if timer is not None:
            timer.cancel()
        self._timers[key] = loop.call_later(max(within, 0.0), self.add, key)

    async def take(self) -> JobKey:
        """Wait for the next job; the caller calls `done` after its work."""
        while not self._waiting:
            self._news.clear()
            await self._news.wait()
        key = next(iter(self._waiting))
        del self._waiting[key]
        self._busy.add(key)
        return key

    def done(self, key: JobKey, *, failed: bool = False) -> None:
        """End the work on a job. After a failure it is queued again, each time after twice as long a pause."""
        self._busy.discard(key)
        if failed:
            count = self._failures[key] = self._failures.get(key, 0) + 1
            self.add_later(key, min(_FIRST_PAUSE * 2.0 ** min(count - 1, 16), _LONGEST_PAUSE))
        else:
            self._failures.pop(key, None)
        if key in self._again:
            self._again.discard(key)
            if not failed:
                self.add(key)

    def close(self) -> None:
        """Cancel all timers."""
        for timer in self._timers.values():
            timer.cancel()
