"""Check whether several forked processes can read a data set at once, though its author did not plan for it.

A file that is open when a process forks has one position for parent and child: two of them that seek and read get each
other's bytes, and no error shows it. A connection to a database is shared the same way. Files that are only mapped into
memory have no position that counts.
"""

import os
import stat


def open_descriptors() -> frozenset[int]:
    """Those of this process, now."""
    found = [int(name) for name in os.listdir("/proc/self/fd")]
    return frozenset(descriptor for descriptor in found if _is_open(descriptor))  # the listing's own is closed by now


def shared_positions(before: frozenset[int]) -> list[str]:
    """Descriptors opened since `before` that two processes could not read at once: paths, or kinds.

    before: the descriptors that were open before the script began.
    """
    mapped = _mapped_files()
    found = []
    for descriptor in sorted(open_descriptors() - before):
        try:
            status = os.fstat(descriptor)
            name = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:
            continue  # closed meanwhile
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
