"""Changes the pool at the request of others: by a list file, by commands, by signals, by the workers themselves."""

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from regrow.core.errors import UsageError
from regrow.core.ids import Instant, Seconds
from regrow_batch.members import read_list
from regrow_batch.pool import Pool

LOOK_S: Seconds = 0.5
RENEW_S: Seconds = 2.0
"""Interval at which a worker renews its registration."""
LEASE_S: Seconds = 10.0
"""Time that a worker belongs to the pool after its last renewal."""


class Attendance:
    """Changes a pool at the request of others.

    Args:
        pool: the pool.
        grace: time for the rows of a worker that must leave.
        changed: called after each change.
        say: prints a sentence about each change.
    """

    def __init__(self, pool: Pool, *, grace: Seconds, changed: Callable[[], None], say: Callable[[str], None]) -> None:
        self._pool, self._grace, self._changed, self._say = pool, grace, changed, say
        self._listed: dict[str, int] = {}
        self._stamp: tuple[int, int, int] | None = None
        self._was_empty = False
        self.leases: dict[str, Instant] = {}
        """End of each registered worker's lease."""
        self._sent_away: set[str] = set()

    def join(self, url: str, cap: int = 0) -> None:
        """Add a worker, or take one back."""
        self._sent_away.discard(url)
        self._pool.join(url, time.monotonic(), cap=cap)
        self._changed()

    def renew(self, url: str, cap: int, lease: Seconds, *, again: bool) -> bool:
        """Register a worker or renew its lease. False: it was asked to leave, and has left.

        Args:
            url: the worker's address.
            cap: most rows at once; 0: the pool's.
            lease: time that it belongs to the pool.
            again: it has registered before: then it does not rejoin after it was asked to leave.
        """
        if again and url in self._sent_away and url not in self._pool.workers:
            self.leases.pop(url, None)
            return False
        if not again or url not in self._sent_away:
            if url not in self.leases:
                self._say(f"worker {url} has announced itself")
            self.join(url, cap)
        self.leases[url] = time.monotonic() + lease
        return True

    def end_leases(self, now: Instant) -> None:
        """Ask the workers to leave whose leases have expired."""
        for url in [url for url, until in self.leases.items() if until <= now]:
            del self.leases[url]
            if url not in self._sent_away:
                self._say(f"worker {url} has not announced itself again: it gets no more rows")
                self._leave(url, self._grace)

    async def watch_leases(self) -> None:
        """Check the leases at intervals. Time in which this process was suspended extends them."""
        looked = time.monotonic()
        while True:
            await asyncio.sleep(LOOK_S)
            now = time.monotonic()
            if (late := now - looked - LOOK_S) > LOOK_S:
                self.leases = {url: until + late for url, until in self.leases.items()}
            looked = now
            self.end_leases(now)

    def drain(self, url: str, grace: Seconds | None = None, *, leased: bool = False) -> bool:
        """Ask a worker to leave. False: it is not in the pool. `leased`: the worker itself asks."""
        if leased:
            self.leases.pop(url, None)
        elif url in self.leases:
            self._sent_away.add(url)
        return self._leave(url, self._grace if grace is None else grace)

    def _leave(self, url: str, grace: Seconds) -> bool:
        left = self._pool.drain(url, time.monotonic(), grace=grace)
        self._changed()
        return left

    def follow_list(self, members: Mapping[str, int]) -> None:
        """Add the new workers of a list, and ask those to leave that are no longer in it; others are unchanged."""
        for url in [url for url in self._listed if url not in members]:
            self._say(f"worker {url} is no longer listed: it may finish its rows within {self._grace:g} s")
            self.drain(url)
        for url, cap in members.items():
            if self._listed.get(url) != cap:
                self._say(f"worker {url} is listed")
                self.join(url, cap)
        self._listed = dict(members)

    def look_again(self, path: Path) -> None:
        """Read the file even if it seems unchanged, as a signal requests."""
        self._stamp = None
        try:
            self.look(path)
        except UsageError as error:
            self._say(f"{error}; workers stay as they were")

    def look(self, path: Path) -> None:
        """Read the file if it has changed. Raises `UsageError`."""
        try:
            found = path.stat()
            stamp = (found.st_mtime_ns, found.st_size, found.st_ino)
            if stamp == self._stamp:
                return
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise UsageError(f"the list of workers {path} cannot be read: {reason}") from error
        members = read_list(text, str(path))
        if not members and self._listed and not self._was_empty:
            # The file is probably being written. If it is still empty next time, it is meant to be.
            self._was_empty = True
            return
        self._was_empty = False
        self._stamp = stamp
        self.follow_list(members)

    async def watch(self, path: Path) -> None:
        """Follow a file. While it cannot be read or parsed, workers stay as they are, which is reported once."""
        reported = ""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                self.look(path)
                reported = ""
            except UsageError as error:
                if str(error) != reported:
                    reported = str(error)
                    self._say(f"{error}; workers stay as they were")
