"""Watch on a folder: the kernel counts opens and reads of everything in it (inotify). Linux only."""

import contextlib
import ctypes
import os
import struct
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_IN_ACCESS, _IN_OPEN, _IN_CREATE, _IN_MOVED_TO = 0x1, 0x20, 0x100, 0x80
_IN_ISDIR, _IN_Q_OVERFLOW = 0x40000000, 0x4000
_EVENT = struct.Struct("iIII")
_libc = ctypes.CDLL(None, use_errno=True)


class DiskWatch:
    """Counts what happens in a folder and in those below it, from now on, whichever process does it.

    `opens` and `reads` (of files) have a number for each path. A folder that is made later is watched from then on;
    files opened in it before the watch stands may be missed, files opened in folders that are there already are not.
    """

    def __init__(self, folder: Path) -> None:
        self.opens: Counter[str] = Counter()
        self.reads: Counter[str] = Counter()
        self._descriptor = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._descriptor < 0:
            raise OSError(ctypes.get_errno(), "inotify cannot be had")
        self._folders: dict[int, Path] = {}
        for each in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
            self._add(each)

    def _add(self, folder: Path) -> None:
        mask = _IN_ACCESS | _IN_OPEN | _IN_CREATE | _IN_MOVED_TO
        number = _libc.inotify_add_watch(self._descriptor, os.fsencode(folder), mask)
        if number < 0:
            raise OSError(ctypes.get_errno(), f"{folder} cannot be watched")
        self._folders[number] = folder

    def update(self) -> None:
        """Take in what has happened until now."""
        while True:
            try:
                data = os.read(self._descriptor, 1 << 20)
            except BlockingIOError:
                return
            at = 0
            while at < len(data):
                number, mask, _, length = _EVENT.unpack_from(data, at)
                at += _EVENT.size
                name = os.fsdecode(data[at : at + length].rstrip(b"\0"))
                at += length
                self._count(number, mask, name)

    def _count(self, number: int, mask: int, name: str) -> None:
        assert not mask & _IN_Q_OVERFLOW, "more happened than could be counted"
        if number not in self._folders:
            return
        path = self._folders[number] / name
        if mask & _IN_ISDIR and mask & (_IN_CREATE | _IN_MOVED_TO):
            with contextlib.suppress(FileNotFoundError):
                self._add(path)
        if mask & _IN_OPEN:
            self.opens[str(path)] += 1
        if mask & _IN_ACCESS and not mask & _IN_ISDIR:  # listing a folder reads no state
            self.reads[str(path)] += 1

    def close(self) -> None:
        os.close(self._descriptor)


@contextmanager
def watched(folder: Path) -> Iterator[DiskWatch]:
    """Count within the block; the counts can be looked at after it."""
    watch = DiskWatch(folder)
    try:
        yield watch
        watch.update()
    finally:
        watch.close()
