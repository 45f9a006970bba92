"""The folder with the entries of one identity in a node's cache: lists, reads, writes, evicts. Needs no torch.

Several processes write into one folder: workers, the producer, the agent. So only a listing shows the entries, and
between two listings an entry can disappear or be added.
"""

import contextlib
import errno
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from regrow.core.errors import CacheUnusable, Damaged, NoRoom, RegrowError
from regrow.data.cache.layout import Draft, Encoded, Key, Mapped, key_of, map_entry, name_of, publish, write, writer_of

_REFRESH_EVERY = 64
"""Calls of `refresh_at_times` between two listings."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM)


@dataclass
class Counters:
    """Counts of entries in this process. `nbytes`: bytes written."""

    served: int = 0
    made: int = 0
    damaged: int = 0
    evicted: int = 0
    nbytes: int = 0


class CacheFolder:
    """The folder of one identity. Not thread-safe.

    Args:
        root: the folder of the cache, which must exist.
        identity: identity of the entries; its folder is made with the first entry.
        budget: bytes that the cache may hold, including other identities.

    Raises `CacheUnusable` if the folder exists but cannot be read.
    """

    def __init__(self, root: Path, identity: bytes, budget: int) -> None:
        self.root = root
        self.path = root / identity.hex()
        self.identity = identity
        self.budget = budget
        self.counters = Counters()
        self._sizes: dict[Key, int] = {}
        self._until_listing = 0
        self.refresh(sweep=True)

    def path_of(self, key: Key) -> Path:
        """Path of the entry of `key`, which need not exist."""
        return self.path / name_of(key)

    @property
    def entries(self) -> dict[Key, int]:
        """Present entries with their sizes in bytes, by the last listing and the changes made here since."""
        return dict(self._sizes)

    @property
    def nbytes(self) -> int:
        """Total size of `entries` in bytes."""
        return sum(self._sizes.values())

    def refresh(self, *, sweep: bool = False) -> None:
        """List the folder. `sweep`: remove the temporary files of writers that have died. Raises `CacheUnusable`."""
        self._until_listing = _REFRESH_EVERY
        try:
            self._sizes = dict(self._listed(sweep))
        except (FileNotFoundError, NotADirectoryError):
            self._sizes = {}
        except OSError as error:
            raise _as_ours(error, self.path) from error

    def refresh_at_times(self) -> None:
        """List the folder at every 64th call: often enough to notice others' entries. Raises `CacheUnusable`."""
        self._until_listing -= 1
        if self._until_listing <= 0:
            self.refresh()

    def other_bytes(self) -> int:
        """Total bytes of the entries of other identities below the same root."""
        total = 0
        with contextlib.suppress(OSError), os.scandir(self.root) as folders:
            for folder in folders:
                other = folder.path != str(self.path) and folder.is_dir(follow_symlinks=False)
                if other and re.fullmatch("[0-9a-f]{32}", folder.name):
                    total += sum(size for _, size in _entries(folder.path))
        return total

    def find(self, key: Key) -> Mapped | None:
        """Open the entry of `key` and check it; None if there is none, or a damaged one. Counts both outcomes.

        Raises `CacheUnusable`.
        """
        try:
            mapped = map_entry(self.path, key, self.identity)
        except Damaged:
            self.counters.damaged += 1
            mapped = None
        except OSError as error:
            raise _as_ours(error, self.path) from error
        if mapped is None:
            self._sizes.pop(key, None)
            return None
        self._sizes[key] = mapped.head.nbytes
        self.counters.served += 1
        return mapped

    def put(self, entry: Encoded | Draft) -> int:
        """Write an entry, or publish a draft; returns its size in bytes.

        Raises `NoRoom` or `CacheUnusable`; then no file of the entry is left.
        """
        try:
            written = publish(entry) if isinstance(entry, Draft) else write(self.path, entry)
        except OSError as error:
            raise _as_ours(error, self.path) from error
        self._sizes[entry.key] = written
        self.counters.made += 1
        self.counters.nbytes += written
        return written

    def evict(self, keys: Iterable[Key]) -> int:
        """Remove entries, if they still exist; returns the number of bytes freed.

        A reader that has mapped an entry keeps it. Raises `CacheUnusable`.
        """
        freed = 0
        for key in keys:
            size = self._sizes.pop(key, 0)
            try:
                os.unlink(self.path_of(key))
            except FileNotFoundError:
                continue
            except OSError as error:
                self._sizes[key] = size
                raise _as_ours(error, self.path) from error
            freed += size
            self.counters.evicted += 1
        return freed

    def _listed(self, sweep: bool) -> Iterator[tuple[Key, int]]:
        with os.scandir(self.path) as found:
            for each in found:
                key = key_of(each.name)
                if key is None:
                    if sweep:
                        _remove_if_left(each)
                    continue
                with contextlib.suppress(FileNotFoundError):  # evicted by another process meanwhile
                    yield key, each.stat(follow_symlinks=False).st_size


def sweep(folder: Path) -> None:
    """Remove the temporary files that dead writers have left in a folder, if it exists. Raises no error."""
    with contextlib.suppress(OSError), os.scandir(folder) as found:
        for each in found:
            _remove_if_left(each)


def _remove_if_left(file: "os.DirEntry[str]") -> None:
    writer = writer_of(file.name)
    if writer is None or _is_alive(writer):
        return
    with contextlib.suppress(FileNotFoundError):
        os.unlink(file.path)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def _entries(folder: str) -> Iterator[tuple[Key, int]]:
    with contextlib.suppress(OSError), os.scandir(folder) as found:
        for each in found:
            if (key := key_of(each.name)) is not None:
                with contextlib.suppress(FileNotFoundError):
                    yield key, each.stat(follow_symlinks=False).st_size


def _as_ours(error: OSError, path: Path) -> RegrowError:
    why = error.strerror or str(error)
    if error.errno in _FULL:
        return NoRoom(f"{path} takes no more: {why}", hint="lower --data-cache-bytes, or choose another --data-cache")
    return CacheUnusable(f"{path} cannot be used: {why}", hint="choose a folder for --data-cache that can be written")
