"""Settings of the C library's allocator for the memory of gradients."""

import ctypes

# From malloc.h of glibc.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MOST = (1 << 31) - 1
_LARGEST_FROM_HEAP = 32 << 20
"""The largest threshold that glibc accepts; glibc may also reach it by itself."""


def keep_freed_memory() -> bool:
    """Let this process keep freed memory for its next allocations.

    glibc returns the end of its heap as soon as 128 KiB of it are free, or some MiB later on. If whole gradients are
    freed and allocated in each backward, the kernel then takes and clears the same pages over and over.

    Returns:
        False if the C library has no such setting.
    """
    adjust = getattr(ctypes.CDLL(None), "mallopt", None)
    if adjust is None:
        return False
    # Both, since setting one ends the automatic adaptation of the other.
    return bool(adjust(_M_MMAP_THRESHOLD, _LARGEST_FROM_HEAP)) and bool(adjust(_M_TRIM_THRESHOLD, _MOST))
