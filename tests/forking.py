"""Preparation of a process before others are forked from it, so that each of them costs a fifth.

To fork and end a process with torch imported takes 16 ms of a processor, nearly all for the tables of 60,000 small
pages, and a run of the tests forks tens of thousands. Pages that a child writes to are copied in small ones, as before.
"""

import ctypes
import gc
from pathlib import Path

_MADV_COLLAPSE = 25
_BYTES = 2 << 20


def prepare_to_fork() -> None:
    """Children do not look for garbage in what there is by now, and it is in large pages."""
    gc.collect()
    gc.freeze()
    _collapse()


def _collapse() -> None:
    """Put all memory of this process that is not a file's into large pages, where the kernel can (Linux 6.1)."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int)
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, rights, _, _, _, *name = line.split()
        if rights != "rw-p" or name not in ([], ["[heap]"]):
            continue
        start, end = (int(each, 16) for each in addresses.split("-"))
        for place in range(-(-start // _BYTES) * _BYTES, end // _BYTES * _BYTES, _BYTES):
            madvise(place, _BYTES, _MADV_COLLAPSE)
