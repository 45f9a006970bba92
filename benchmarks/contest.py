"""One job of a benchmark: started, followed through its records, subjected to faults, and ended without leftovers.

The code is the same for every side. Sides differ in a command line and a folder of records.
"""

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Self

import psutil

from regrow.core.ids import Generation, Rank, Seconds, StepNo
from regrow.core.records import StepCommitted
from regrow.observe.ledger import Ledger, time_lost
from regrow.observe.scene import Scene
from regrow.observe.tail import RecordTail

POLL: Seconds = 0.02
START_DEADLINE: Seconds = 120.0
RECOVERY_DEADLINE: Seconds = 120.0
STOP_DEADLINE: Seconds = 20.0


class JobStuck(Exception):
    """An event that a benchmark waited for did not occur; the message names it, and the job's output file."""


@dataclass(frozen=True)
class Kill:
    """One SIGKILL of a rank's process, and the generation that it ended."""

    rank: int
    killed_at: float
    ended: Generation
    recovered: bool


class Job:
    """A job under a launcher: started on entry, and completely ended on exit.

    Args:
        name: for messages.
        command: the launcher's command line.
        records: the folder in which `steps.*.jsonl` (and `events.jsonl`) appear.
        log: file for the launcher's and the workers' output.
        world: ranks.
        environment: variables in addition to this process's.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        records: Path,
        log: Path,
        world: int,
        environment: Mapping[str, str],
    ) -> None:
        self.name = name
        self.scene = Scene(ledger=Ledger(world=world))
        self._command = list(command)
        self._tail = RecordTail(records)
        self._log = log
        self._environment = {**os.environ, **environment}
        self._process: subprocess.Popen[bytes] | None = None
        self._paused = False

    def __enter__(self) -> Self:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
            )
        return self

    def __exit__(self, *exception: object) -> None:
        process = self._process
        if process is None:
            return
        if self._paused:
            self.go_on()
        family = _descendants(process.pid)
        for sign in (signal.SIGTERM, signal.SIGKILL):
            if process.poll() is None:
                process.send_signal(sign)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(STOP_DEADLINE)
        if left := [child.pid for child in family if child.is_running()]:
            print(f"  {self.name}: the launcher left {len(left)} processes behind, which are now ended: {left}")
        for child in family:
            with suppress(psutil.NoSuchProcess):
                child.kill()

    @property
    def ledger(self) -> Ledger:
        """All that the job had written at the last `look`."""
        return self.scene.ledger

    @property
    def ended(self) -> bool:
        """True if the launcher has ended."""
        return self._process is not None and self._process.poll() is not None

    def wait(self, until: Callable[[], bool], *, deadline: Seconds, what: str) -> None:
        """Read records until a condition on them holds. Raises `JobStuck`."""
        end = time.monotonic() + deadline
        self.look()
        while not until():
            while not self.look():
                if self.ended or time.monotonic() > end:
                    why = "the job has ended" if self.ended else f"{deadline:.0f} s have passed"
                    raise JobStuck(f"{self.name}: no {what}: {why}; its output is in {self._log}")
                time.sleep(POLL)

    def look(self) -> bool:
        """Read new records; returns True if there were any."""
        new = self._tail.poll()
        self.scene.add_all(new)
        return bool(new)

    @property
    def world_step(self) -> int:
        """The newest step that every rank has committed."""
        commits, world = self.ledger.commits, self.ledger.world
        newest = self.ledger.last_step
        return next((step for step in range(newest or 0, -1, -1) if len(commits.get(StepNo(step), {})) == world), -1)

    def wait_steps(self, count: int, *, deadline: Seconds = START_DEADLINE) -> None:
        """Wait until every rank has committed `count` steps more than now. Raises `JobStuck`."""
        self.look()
        target = self.world_step + count
        self.wait(lambda: self.world_step >= target, deadline=deadline, what=f"step {target}")

    def pid(self, rank: int) -> int:
        """The process that filled the rank at its newest commit."""
        newest = self._newest[Rank(rank)]
        return int(newest.metrics["pid"])

    @property
    def generation(self) -> Generation:
        """The newest generation (torchrun: restart count) that committed."""
        return max(commit.generation for commit in self._newest.values())

    @property
    def _newest(self) -> dict[Rank, StepCommitted]:
        """The newest commit that each rank computed itself."""
        newest: dict[Rank, StepCommitted] = {}
        for _, ranks in sorted(self.ledger.commits.items()):
            newest |= {rank: commit for rank, commit in ranks.items() if not commit.adopted}
        return newest

    def pause(self) -> None:
        """Stop all ranks by SIGSTOP."""
        self._paused = True
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Continue all ranks."""
        self._paused = False
        self._signal(signal.SIGCONT)

    @property
    def ranks(self) -> Sequence[int]:
        """The present ranks."""
        return range(self.ledger.world)

    def _signal(self, sign: signal.Signals) -> None:
        for rank in self.ranks:
            with suppress(ProcessLookupError):
                os.kill(self.pid(rank), sign)

    def kill(self, rank: int) -> Kill:
        """SIGKILL a rank now and wait until the step beyond the last committed one is committed on every rank."""
        self.look()
        ended, pid = self.generation, self.pid(rank)
        killed_at = time.monotonic()
        os.kill(pid, signal.SIGKILL)

        def regained() -> bool:
            return time_lost(self.ledger, killed_at=killed_at, ended=ended, step_median=0.0) is not None

        try:
            self.wait(regained, deadline=RECOVERY_DEADLINE, what=f"recovery from the kill of rank {rank}")
        except JobStuck as stuck:
            print(f"  not recovered: {stuck}")
            return Kill(rank, killed_at, ended, recovered=False)
        return Kill(rank, killed_at, ended, recovered=True)


def lost_seconds(ledger: Ledger, kill: Kill) -> Seconds | None:
    """Time lost to a kill, by the one definition for all sides (`regrow.observe.ledger.time_lost`)."""
    if ledger.step_median is None:
        return None
    return time_lost(ledger, killed_at=kill.killed_at, ended=kill.ended, step_median=ledger.step_median)


def redone_steps(ledger: Ledger, kill: Kill) -> int:
    """Steps that a rank had committed before this kill and committed again after it."""
    again = set()
    for (step, _), history in ledger.history.items():
        computed = [commit.generation for commit in history if not commit.adopted]
        again |= {step for before, after in pairwise(computed) if before <= kill.ended < after}
    return len(again)


def strike(job: Job, draw: random.Random, *, kills: int, warm: Callable[[], bool]) -> list[Kill]:
    """Kill random ranks, each at a random time in a step, and stop at the first kill without recovery.

    Between kills at least three steps pass, then up to nine more, so that a kill can fall anywhere between two
    checkpoints; the next kill waits until the job is `warm` again.
    """
    struck: list[Kill] = []
    for number in range(kills):
        job.wait_steps(3 + draw.randrange(10))
        job.wait(warm, deadline=START_DEADLINE, what="standby")
        job.wait_steps(1)
        time.sleep(draw.random() * (job.ledger.step_median or 0.0))
        kill = job.kill(draw.randrange(job.ledger.world))
        struck.append(kill)
        if not kill.recovered:
            break
        lost, redone = lost_seconds(job.ledger, kill), redone_steps(job.ledger, kill)
        print(f"  {job.name}: kill {number + 1} of {kills}, rank {kill.rank}: {lost:.2f} s lost, {redone} steps redone")
    return struck


def _descendants(leader: int) -> list[psutil.Process]:
    try:
        return list(psutil.Process(leader).children(recursive=True))
    except psutil.NoSuchProcess:
        return []
