"""Changes of the pool from outside: by a file, by commands, by signals, by workers themselves."""

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
"""Between two announcements of a worker that announces itself."""
LEASE_S: Seconds = 10.0
"""Time that it belongs after the last one."""


class Attendance:
    """Keeps a pool as it is told.

    Args:
        pool: which.
        grace: how long a worker that has to go may take for the rows it has.
        changed: called after each change.
        say: told in a sentence what has changed.
    """

    def __init__(self, pool: Pool, *, grace: Seconds, changed: Callable[[], None], say: Callable[[str], None]) -> None:
        self._pool, self._grace, self._changed, self._say = pool, grace, changed, say
        self._listed: dict[str, int] = {}
        self._stamp: tuple[int, int, int] | None = None
        self._was_empty = False
        self.leases: dict[str, Instant] = {}
        """Until when workers belong that have announced themselves."""
        self._sent_away: set[str] = set()

    def join(self, url: str, cap: int = 0) -> None:
        """Take a worker in, or back."""
        self._sent_away.discard(url)
        self._pool.join(url, time.monotonic(), cap=cap)
        self._changed()

    def renew(self, url: str, cap: int, lease: Seconds, *, again: bool) -> bool:
        """A worker announces itself. False: it was asked to go, and has left.

        Args:
            url: of the worker.
            cap: rows at once; 0: the pool's.
            lease: time for which it belongs.
            again: whether it has said so before: then it does not come back from being asked to go.
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
        """Ask those to go that have not renewed their leases."""
        for url in [url for url, until in self.leases.items() if until <= now]:
            del self.leases[url]
            if url not in self._sent_away:
                self._say(f"worker {url} has not announced itself again: it gets no more rows")
                self._leave(url, self._grace)

    async def watch_leases(self) -> None:
        """Look for them at intervals. Time in which this process stood still is no fault of theirs."""
        looked = time.monotonic()
        while True:
            await asyncio.sleep(LOOK_S)
            now = time.monotonic()
            if (late := now - looked - LOOK_S) > LOOK_S:
                self.leases = {url: until + late for url, until in self.leases.items()}
            looked = now
            self.end_leases(now)

    def drain(self, url: str, grace: Seconds | None = None, *, leased: bool = False) -> bool:
        """Ask a worker to go. False: it is not here. `leased`: it asks for it itself."""
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
        """Take in who is new in a list, and ask those to go who are no longer in it. Others are left as they are."""
        for url in [url for url in self._listed if url not in members]:
            self._say(f"worker {url} is no longer listed: it may finish its rows within {self._grace:g} s")
            self.drain(url)
        for url, cap in members.items():
            if self._listed.get(url) != cap:
                self._say(f"worker {url} is listed")
                self.join(url, cap)
        self._listed = dict(members)

    def look_again(self, path: Path) -> None:
        """Read the file, also where it seems the same: what a signal asks for."""
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
            # Most likely it is just being written; if it is empty the next time too, it is meant.
            self._was_empty = True
            return
        self._was_empty = False
        self._stamp = stamp
        self.follow_list(members)

    async def watch(self, path: Path) -> None:
        """Follow a file; while it cannot be read or understood, workers stay as they are, which is said once."""
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
