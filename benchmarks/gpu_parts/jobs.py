"""Runs jobs with one incident each at once, and reports their results."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_session import SKIPPED

DEVICE = os.environ.get("REGROW_BENCH_DEVICE", "cpu")
LIMIT_S = float(os.environ.get("REGROW_GPU_LIMIT_S", "60"))
"""Time limit of the whole part, in seconds."""
INCIDENT = Path(__file__).with_name("incident.py")
LAST_LINES = 4


def tell(**figures: Any) -> None:
    """Print a line with figures of this part."""
    print(json.dumps(figures), flush=True)


def skip(why: str) -> int:
    """Print the reason why this part cannot run here; returns its exit code."""
    tell(skipped=why)
    return SKIPPED


@dataclass
class Job:
    """A job of `incident.py`.

    Attributes:
        mode: its incident.
        options: of `regrow run`.
        ranks: their number.
        steps: their number.
    """

    mode: str
    options: Sequence[str] = ("--standby", "1")
    ranks: int = 2
    steps: int = 40
    seconds: float = 0.0
    code: int | None = None
    _began: float = field(default=0.0, repr=False)
    _process: "subprocess.Popen[bytes] | None" = field(default=None, repr=False)

    @property
    def folder(self) -> Path:
        """Folder of its ranks' output."""
        return Path(os.environ["REGROW_HOME"]) / f"played-{self.mode}"

    def start(self) -> None:
        """Start the job under regrow, in a separate process."""
        self.folder.mkdir(parents=True)
        command = [sys.executable, "-m", "regrow", "run", "--standalone", f"--nproc-per-node={self.ranks}"]
        command += [f"--job=gpu-{self.mode}", *self.options, str(INCIDENT), self.mode, str(self.folder)]
        command += [str(self.steps)]
        self._began = time.monotonic()
        with (self.folder / "log").open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    def over(self) -> bool:
        """True if it has ended."""
        if self._process is None or self.code is not None:
            return True
        self.code = self._process.poll()
        self.seconds = time.monotonic() - self._began
        return self.code is not None

    def give_up(self) -> None:
        """Ask the job to end, as its time is over."""
        if self._process is not None and self.code is None:
            self._process.terminate()

    def answer(self) -> dict[str, Any]:
        """The last state that rank 0 wrote; empty before the end."""
        path = self.folder / "result"
        return dict(json.loads(path.read_text())) if path.exists() else {}

    def said(self) -> list[str]:
        """The last lines that regrow itself has printed."""
        lines = (self.folder / "log").read_text(errors="replace").splitlines()
        return [line[:300] for line in lines if line.startswith("regrow")][-LAST_LINES:]


def play(jobs: Sequence[Job], within: float, meanwhile: Callable[[], None] = lambda: None) -> None:
    """Run jobs beside one another until all have ended or the time is over; prints a line as each one ends."""
    until = time.monotonic() + within
    for job in jobs:
        job.start()
    waiting = list(jobs)
    while waiting and time.monotonic() < until:
        meanwhile()
        for job in [each for each in waiting if each.over()]:
            waiting.remove(job)
            tell(job=job.mode, code=job.code, seconds=round(job.seconds, 1), **job.answer(), said=job.said())
        time.sleep(0.2)
    for job in waiting:
        tell(job=job.mode, code=None, seconds=round(job.seconds, 1), said=job.said())
        job.give_up()


def same(jobs: Sequence[Job], undisturbed: Job) -> bool:
    """True if all jobs ended well, with the bits of the undisturbed job."""
    digest = undisturbed.answer().get("digest")
    good = digest is not None and all(job.code == 0 and job.answer().get("digest") == digest for job in jobs)
    tell(bitwise_equal=good, jobs=[job.mode for job in jobs])
    return good
