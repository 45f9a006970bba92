"""Test that a disk stores data, and gives it back as it was."""

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator

from regrow.health.readings import DiskReading, ProbeAt, ProbeSettings, Reading

_BLOCK = bytes(range(256)) * 4096  # 1 MiB
_BLOCKS = 2


def read(settings: ProbeSettings) -> Iterator[ProbeAt | Reading]:
    """A file of 2 MiB in the folder, or in the nearest folder above it that exists."""
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
    # Without a name where the file system can: nothing is left behind whatever happens.
    with tempfile.TemporaryFile(dir=folder, prefix=".regrow-doctor-") as file:
        start = time.perf_counter()
        for _ in range(_BLOCKS):
            file.write(_BLOCK)
        file.flush()
        os.fsync(file.fileno())
        seconds = time.perf_counter() - start
        with contextlib.suppress(OSError):  # so that it is read from the disk, where that can be asked
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        return seconds, any(file.read(len(_BLOCK)) != _BLOCK for _ in range(_BLOCKS))
