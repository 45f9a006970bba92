"""Checks if several forked processes can read a data set at once, though its author did not plan for it.

Parent and child share the position of a file that is open at the fork: if both seek and read, each may get bytes that
the other has sought, without any error. A connection to a database is shared in the same way. For files that are only
memory-mapped the position does not matter.
"""

import os
import stat


def open_descriptors() -> frozenset[int]:
    """Open file descriptors of this process."""
    found = [int(name) for name in os.listdir("/proc/self/fd")]
    return frozenset(descriptor for descriptor in found if _is_open(descriptor))  # the listing's own is closed by now


def shared_positions(before: frozenset[int]) -> list[str]:
    """Files and sockets opened since `before` that two processes cannot read at once, by path or kind.

    before: the descriptors that were open before the script started.
    """
    mapped = _mapped_files()
    found = []
    for descriptor in sorted(open_descriptors() - before):
        try:
            status = os.fstat(descriptor)
            name = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:
            continue  # the descriptor was closed meanwhile
        is_read_by_position = stat.S_ISREG(status.st_mode) and _is_read(descriptor) and name not in mapped
        if stat.S_ISSOCK(status.st_mode) or is_read_by_position:
            found.append(name)
    return found


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _is_read(descriptor: int) -> bool:
    with open(f"/proc/self/fdinfo/{descriptor}", encoding="ascii") as file:
        flags = next(int(line.split()[1], 8) for line in file if line.startswith("flags:"))
    return flags & os.O_ACCMODE != os.O_WRONLY


def _mapped_files() -> set[str]:
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        lines = [line.rstrip("\n").split(maxsplit=5) for line in maps]
    return {fields[5] for fields in lines if len(fields) > 5}
