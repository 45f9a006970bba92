"""Settings of the C library's allocator for the memory of gradients."""

import ctypes

# From malloc.h of glibc.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MOST = (1 << 31) - 1
_LARGEST_FROM_HEAP = 32 << 20
"""The largest threshold that glibc takes; without a word of ours it comes to that by itself."""


def keep_freed_memory() -> bool:
    """Let freed memory stay with this process, for what it allocates next.

    glibc gives the end of its heap back as soon as 128 KiB of it are free, or some MiB later on. Where whole gradients
    are freed and allocated in each backward, the kernel then takes and clears the same pages over and over.

    Returns:
        False where the C library knows no such thing.
    """
    adjust = getattr(ctypes.CDLL(None), "mallopt", None)
    if adjust is None:
        return False
    # To set one of them would end the adaptation of the other.
    return bool(adjust(_M_MMAP_THRESHOLD, _LARGEST_FROM_HEAP)) and bool(adjust(_M_TRIM_THRESHOLD, _MOST))
