"""Memory that processes share through a descriptor, without a name that would have to be removed later."""

import fcntl
import os
import tempfile

from regrow.core.errors import REFUSALS

_SHARED_MEMORY = "/dev/shm"
_ZEROS = bytes(1 << 20)


def memory_file(name: str, *, sealed: bool = False) -> int:
    """Descriptor of a new, empty memory file, which is not inherited. Raises `OSError`.

    If `memfd_create` is refused (filters of containers, gVisor), it is a file in shared memory, unlinked at once.

    Args:
        name: shown in `/proc/<pid>/fd`.
        sealed: nobody may shrink the file, if the kernel can enforce that.
    """
    try:
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC | (os.MFD_ALLOW_SEALING if sealed else 0))
    except OSError as refused:
        return _unlinked(name, refused)
    if sealed:
        # A reader would die of SIGBUS if the file shrank under it.
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return descriptor


def _unlinked(name: str, refused: OSError) -> int:
    for folder in (_SHARED_MEMORY, None):
        try:
            descriptor, path = tempfile.mkstemp(prefix=f"{name}-", dir=folder)
        except OSError:
            continue
        os.unlink(path)
        return descriptor
    raise refused


def is_memory_file(descriptor: int, name: str, *, sealed: bool = False) -> bool:
    """True if the descriptor is a memory file of this name; with `sealed`, a sealed one where the kernel can seal."""
    try:
        shown = os.readlink(f"/proc/self/fd/{descriptor}")
        if sealed and shown.startswith("/memfd:"):
            return bool(fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:
        return False
    return name in shown and shown.endswith("(deleted)")


def reserve(descriptor: int, size: int) -> None:
    """Grow the file to this size and allocate all its memory, so that no later access fails. Raises `OSError`."""
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno not in REFUSALS:
            raise
        have = os.fstat(descriptor).st_size
        while have < size:
            have += os.pwrite(descriptor, _ZEROS[: size - have], have)
