"""Part 3: one rank skips one all-reduce: the processes' activity meanwhile, and whether the job recovers."""

import json
import sys
import time
from pathlib import Path

import psutil

from gpu_parts.jobs import LIMIT_S, Job, play, same, tell

LOOK_S = 2.0


class Looks:
    """Observes a job's ranks from outside: their state, and the share of a core that each uses."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: dict[int, psutil.Process] = {}
        self._next = 0.0

    def take(self) -> None:
        """Observe the ranks every few seconds, from the incident on."""
        if time.monotonic() < self._next or not (self._folder / "skip").exists():
            return
        self._next = time.monotonic() + LOOK_S
        for path in self._folder.glob("pid-*"):
            _, rank, pid = path.name.split("-")
            try:
                known = int(pid) in self._seen
                process = self._seen.setdefault(int(pid), psutil.Process(int(pid)))
                share, state = process.cpu_percent(), process.status()
            except psutil.NoSuchProcess:
                continue
            if not known:
                continue  # its share is that since the last look
            errors = self._folder / f"errors-{pid}"
            last = errors.read_text().splitlines()[-1:] if errors.exists() else []
            said = json.loads(last[0])["errors"] if last else []
            tell(rank=int(rank), pid=int(pid), state=state, cpu_percent=share, nccl_errors=said)


def main() -> int:
    """Check that the job went on by itself within the limit, with the result of an undisturbed one."""
    none, job = Job("none", options=()), Job("skip", options=("--hang-timeout=10s", "--standby=1"))
    play([none, job], LIMIT_S - 5, Looks(job.folder).take)
    return 0 if same([job], none) else 1


if __name__ == "__main__":
    sys.exit(main())
