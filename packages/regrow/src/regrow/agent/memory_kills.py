"""Count of processes that the kernel has killed here because memory ran out."""

from pathlib import Path

_GROUPS = Path("/proc/self/cgroup")
_MOUNT = Path("/sys/fs/cgroup")
_MACHINE = Path("/proc/vmstat")


def memory_kills() -> int:
    """`oom_kill` of this process's control group (version 2), or of the whole machine if it is in no such group."""
    for path in (*_events(), _MACHINE):
        try:
            text = path.read_text()
        except OSError:
            continue
        for line in text.splitlines():
            name, _, number = line.partition(" ")
            if name == "oom_kill" and number.strip().isdigit():
                return int(number)
    return 0


def _events() -> list[Path]:
    try:
        lines = _GROUPS.read_text().splitlines()
    except OSError:
        return []
    return [_MOUNT / line[3:].lstrip("/") / "memory.events" for line in lines if line.startswith("0::")]


class MemoryKills:
    """Detects that a process was killed for lack of memory: the kernel's count of such kills has grown."""

    def __init__(self) -> None:
        self._known = memory_kills()

    def explains(self, code: int) -> bool:
        """True if a process that ended with this code was killed for lack of memory; each kill explains one end."""
        if code != -9:
            return False
        known, self._known = self._known, max(self._known, memory_kills())
        if self._known > known:
            self._known = known + 1  # Each kill explains one exit.
            return True
        return False
