"""Check that a node has memory for one more worker, from the kernel's figures and without a reservation."""

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from regrow.core.ids import NodeId

_TWICE = 2
"""Factor on a rank's memory: a second copy needs as much, and as much again stays free for growth of the ranks."""
_GROUPS = Path("/sys/fs/cgroup")
_V2 = ("memory.max", "memory.current", "inactive_file")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def refusal(ranks: Iterable[int], node: NodeId, proc: Path = Path("/proc"), groups: Path = _GROUPS) -> str:
    """Reason, for people, why there is no memory for another worker like these processes; empty: there is."""
    wanted = _TWICE * max((_resident(pid, proc) for pid in ranks), default=0)
    free = min([_available(proc), *_left_in_groups(proc, groups)])
    if free >= wanted:
        return ""
    return f"there is no room for a second copy on {node}: {free >> 20} MiB are free, {wanted >> 20} MiB are needed"


def _resident(pid: int, proc: Path) -> int:
    try:
        return int((proc / str(pid) / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):  # The process has just ended.
        return 0


def _available(proc: Path) -> int:
    try:
        lines = (proc / "meminfo").read_text().splitlines()
    except OSError:
        return 0
    found = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return int(next(found, "0")) << 10


def _left_in_groups(proc: Path, groups: Path) -> Iterator[int]:
    """Memory left in each control group of this process, and in each of their parents, with reclaimable memory."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, kinds, path = line.split(":", 2)
        if number == "0":
            yield from _left(groups, path, _V2)
        elif "memory" in kinds.split(","):
            yield from _left(groups / "memory", path, _V1)


def _left(root: Path, path: str, names: tuple[str, str, str]) -> Iterator[int]:
    here = root / path.strip("/")
    for folder in [here, *here.parents]:
        with contextlib.suppress(OSError, ValueError):  # There is no limit, or the file belongs to another container.
            limit, used = (int((folder / name).read_text()) for name in names[:2])
            yield limit - used + _cached(folder, names[2])
        if folder == root:
            return


def _cached(folder: Path, name: str) -> int:
    """Bytes that the kernel would release at once: pages of files that were not used recently."""
    with contextlib.suppress(OSError):
        for line in (folder / "memory.stat").read_text().splitlines():
            if line.startswith(f"{name} "):
                return int(line.split()[1])
    return 0
