"""Tests that a disk stores data and returns it unchanged."""

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator

from regrow.health.readings import DiskReading, ProbeAt, ProbeSettings, Reading

_BLOCK = bytes(range(256)) * 4096  # 1 MiB
_BLOCKS = 2


def read(settings: ProbeSettings) -> Iterator[ProbeAt | Reading]:
    """Write and read a file of 2 MiB in the folder, or in its nearest existing parent."""
    folder = os.path.abspath(settings.folder)
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    yield ProbeAt("disk", folder)
    free = 0
    try:
        status = os.statvfs(folder)
        free = status.f_bavail * status.f_frsize
        seconds, wrong = _try(folder)
    except OSError as error:
        yield DiskReading(folder, free, 0.0, error=error.errno)
    else:
        yield DiskReading(folder, free, seconds, wrong)


def _try(folder: str) -> tuple[float, bool]:
    # An unnamed file, if the file system supports it, so that nothing can be left behind.
    with tempfile.TemporaryFile(dir=folder, prefix=".regrow-doctor-") as file:
        start = time.perf_counter()
        for _ in range(_BLOCKS):
            file.write(_BLOCK)
        file.flush()
        os.fsync(file.fileno())
        seconds = time.perf_counter() - start
        with contextlib.suppress(OSError):  # drops the page cache if possible, so that the disk itself is read
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        return seconds, any(file.read(len(_BLOCK)) != _BLOCK for _ in range(_BLOCKS))
