"""Random faults of a job, drawn from a seed, and their execution: kills, stops, signals to all, logouts.

The draw is pure. A job that has ended for it is started again by the same command, as a scheduler would.
"""

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum

import psutil
from tests.process.launching import Site, named
from tests.process.training import SCRIPTS, Fault

from regrow.core.messages.vocabulary import FaultStage, Role
from regrow.core.records import GenerationFormed, Record, WorkerForked, WorkerGone, WorkerSpawned
from regrow.observe.ledger import Ledger, read_records

GLANCE_S = 0.01
_TAIL = 20_000
STEPS = 160


class Act(StrEnum):
    """Act against a job."""

    RANK = "rank"
    """SIGKILL to one worker, whoever it is: a rank, one that builds, a standby."""
    TWO = "two"
    """SIGKILL to two workers of ranks at once."""
    STANDBY = "standby"
    ZYGOTE = "zygote"
    WRITER = "writer"
    AGENT = "agent"
    LAUNCHER = "launcher"
    """SIGKILL to the coordinator's process."""
    POWER = "power"
    """SIGKILL to all processes."""
    TERM = "term"
    """SIGTERM to all processes."""
    LOGOUT = "logout"
    """The user's runtime folder and the temporary folder go."""
    STOP = "stop"
    """SIGSTOP to a worker, and SIGCONT after a while."""
    STOP_AGENT = "stop-agent"
    STOP_LAUNCHER = "stop-launcher"
    MOVE = "move"
    """A rank, or all of a node, is to move to the spare node. Drawn in the place of kills where there is one."""


ENDING = {Act.LAUNCHER, Act.POWER, Act.TERM}
"""After these the job is over."""
WEIGHTS = {
    Act.RANK: 50,
    Act.TWO: 10,
    Act.STANDBY: 4,
    Act.ZYGOTE: 2,
    Act.WRITER: 2,
    Act.AGENT: 4,
    Act.LAUNCHER: 2,
    Act.POWER: 1,
    Act.TERM: 5,
    Act.LOGOUT: 2,
    Act.STOP: 6,
    Act.STOP_AGENT: 2,
    Act.STOP_LAUNCHER: 2,
}


@dataclass(frozen=True)
class Blow:
    """An act, when it comes after the one before, and how long it lasts where it does (seconds)."""

    act: Act
    after: float
    lasts: float


@dataclass(frozen=True)
class Plan:
    """A job, and all that strikes it.

    Attributes:
        failing: newcomers whose script raises; -1: all.
        load: processes beside it that use a processor each.
        faults: kills at stages of steps, besides.
    """

    script: str
    world: int
    nodes: int
    standbys: int
    disk: bool
    failing: int
    load: int
    blows: tuple[Blow, ...]
    faults: tuple[Fault, ...]
    spares: int = 0

    @property
    def extra(self) -> tuple[str, ...]:
        """Arguments of the script."""
        more = ("--microbatches", "8") if self.script == "train_micro.py" else ()
        return ("--steps", str(STEPS), *more)


STAGES = tuple(map(str, (FaultStage.REDUCE, FaultStage.BACKWARD, FaultStage.UPDATE))) * 2 + tuple(
    map(str, (FaultStage.DATA, FaultStage.BEGIN, FaultStage.FORWARD, FaultStage.COMMIT, FaultStage.AFTER))
)
RECOVERING = (str(FaultStage.FORM), str(FaultStage.HYDRATE))


def drawn(seed: int, place: int, strokes: int) -> Plan:
    """Draw `strokes` acts or faults for one job."""
    draw = random.Random(f"faults {seed} {place}")
    script = draw.choice(("train_small.py", "train_micro.py", "train_micro.py"))
    nodes = draw.choice((1, 1, 2))
    world = draw.choice((2, 4)) if nodes == 2 else draw.choice((2, 3, 3))
    failing = draw.choices((0, 1, 2, -1), (70, 10, 10, 10))[0]
    strokes = max(2, strokes // 3) if failing < 0 else strokes  # each has all started again
    planned = draw.randrange(strokes // 2 + 1)
    steps = sorted(draw.sample(range(2, STEPS * 2 // 3), planned))
    faults = [Fault(draw.randrange(world), step, draw.choice(STAGES)) for step in steps]
    faults += [Fault(draw.randrange(world), fault.step, draw.choice(RECOVERING)) for fault in faults[::5]]
    acts = draw.choices(list(WEIGHTS), list(WEIGHTS.values()), k=strokes - planned)
    blows = [
        Blow(act, draw.choice((0.0, 0.05, 0.3, 0.6, 1.5)) * draw.uniform(0.5, 1.5), draw.choice((0.2, 1.0, 4.0)))
        for act in acts
    ]
    plan = Plan(
        script,
        world,
        nodes,
        standbys=draw.randrange(2),
        disk=draw.random() < 0.7,
        failing=failing,
        load=draw.choice((0, 0, 0, 2)),
        blows=tuple(blows),
        faults=tuple(faults),
    )
    if nodes == 1 or draw.random() < 0.5:
        return plan
    moved = [replace(each, act=Act.MOVE) if each.act is Act.RANK and draw.random() < 0.4 else each for each in blows]
    return replace(plan, blows=tuple(moved), spares=1)


@dataclass
class Attempt:
    """One start of the command.

    Attributes:
        struck: the acts that were carried out.
        saved: the newest complete checkpoint that was seen on disk before it ended.
        asked: the newest step that was known to be committed when all were told to end.
    """

    name: str
    code: int | None = None
    said: str = ""
    struck: list[Act] = field(default_factory=list)
    saved: int = -1
    asked: int = -1
    killed: list[float] = field(default_factory=list)
    """Times at which workers were killed, without those that the job kills itself."""
    records: list[Record] = field(default_factory=list)

    @property
    def ledger(self) -> Ledger:
        """Of its records."""
        return Ledger(self.records)

    def killed_since_it_stood(self, slack: float) -> int:
        """Number of workers killed since all ranks stood for the last time, or just before that (seconds)."""
        ledger = self.ledger
        stood = ledger.generations[-1].at if ledger.generations else float("-inf")
        return sum(at > stood - slack for at in [*self.killed, *(each.at for each in ledger.injected)])


class Harassed:
    """A job that is struck as planned, and started again until it has come to its end.

    Args:
        here: where it runs.
        name: of the job; attempts have a number behind it.
        plan: what is to strike it.
        patience: how long one attempt may go on after the last act.
    """

    def __init__(self, here: Site, name: str, plan: Plan, patience: float) -> None:
        self.here, self._name, self._plan, self._patience = here, name, plan, patience
        self._disk = here.folder / "disk"
        self._tmp = here.folder / "tmp"
        self._draw = random.Random(name)
        self._continued: list[tuple[int, float]] = []
        self.attempts: list[Attempt] = []
        self.kills = 0
        self.seconds = 0.0
        self.log: list[str] = []

    def run(self) -> None:
        """Until it ends with 0, or as no job may end: late, or again and again."""
        blows, began = list(self._plan.blows), time.monotonic()
        with _busy(self._plan.load):
            while not self.attempts or self.attempts[-1].code != 0:
                assert len(self.attempts) < len(self._plan.blows) + 4, f"it never ends: {self.told()}"
                self._attempt(blows)
                self.seconds = time.monotonic() - began

    def told(self) -> str:
        """All that was done and said, for people."""
        ends = "\n".join(f"--- {each.name}: {each.code}\n{each.said[-6000:]}" for each in self.attempts)
        return "\n".join([repr(self._plan), *self.log, ends])

    def _words(self, name: str) -> list[str]:
        plan = self._plan
        words = ["run", "--job", name, "--nproc-per-node", str(plan.world // plan.nodes)]
        words += ["--local-nodes", str(plan.nodes + plan.spares)] if plan.nodes > 1 else []
        words += ["--spares", str(plan.spares)] if plan.spares else []
        words += ["--standby", str(plan.standbys), "--max-faults", "100000"]
        if plan.disk:
            words += ["--checkpoint-dir", str(self._disk), "--checkpoint-every", "300ms", "--resume=auto"]
        if plan.faults and len(self.attempts) == 1:  # where they have lost everything they would again
            path = self.here.folder / "plan.toml"
            path.write_text("\n".join(fault.toml() for fault in plan.faults))
            words += ["--fault-plan", str(path)]
        words += [str(SCRIPTS / plan.script), *plan.extra, "--out", str(self.here.folder / f"{self._name}.out")]
        return [*words, "--failing", str(plan.failing), "--pace", "0.01"]

    def _attempt(self, blows: list[Blow]) -> None:
        attempt = Attempt(f"{self._name}-a{len(self.attempts) + 1}")
        self.attempts.append(attempt)
        for folder in (self.here.runtime, self._tmp):
            folder.mkdir(mode=0o700, exist_ok=True)
        path = self.here.folder / f"{attempt.name}.said"
        with path.open("wb") as said:
            job = self.here.popen(
                self._words(attempt.name), output=said.fileno(), errors=said.fileno(), TMPDIR=str(self._tmp)
            )
        try:
            deadline = time.monotonic() + self._patience
            while job.poll() is None and self._steps(attempt) < 0 and blows:
                self._wait(attempt, GLANCE_S, deadline)
            while job.poll() is None and blows:
                blow = blows.pop(0)
                self._wait(attempt, blow.after, time.monotonic() + self._patience)
                self._strike(job.pid, blow, attempt)
                if attempt.struck[-1:] and attempt.struck[-1] in ENDING:
                    break
            if not blows:
                (self.here.folder / "hurry").touch()
            deadline = time.monotonic() + self._patience
            while job.poll() is None:
                self._wait(attempt, GLANCE_S, deadline)
            attempt.code = job.wait(1.0)
        finally:
            attempt.said = path.read_text(errors="replace")
            self._go_on(all_of_them=True)
        attempt.records = list(read_records(self.here.home / "jobs" / attempt.name))
        self.kills += len(attempt.ledger.injected)
        self.log.append(f"{attempt.name} ended with {attempt.code}, at step {attempt.ledger.last_step}")

    def _wait(self, attempt: Attempt, seconds: float, deadline: float) -> None:
        until = time.monotonic() + seconds
        while True:
            attempt.saved = max([attempt.saved, *self.saved()])
            self._go_on()
            time.sleep(max(0.0, min(GLANCE_S, until - time.monotonic())))
            assert time.monotonic() < deadline, f"{attempt.name} does not end, or begin: {self.told()}"
            if time.monotonic() >= until:
                return

    def saved(self) -> list[int]:
        """Steps of the complete checkpoints on disk."""
        return [int(path.parent.name.removeprefix("step-")) for path in self._disk.glob("step-*/regrow.json")]

    def _steps(self, attempt: Attempt) -> int:
        """The newest step that is known to be committed."""
        steps = [-1]
        for path in (self.here.home / "jobs" / attempt.name).glob("steps.*.jsonl"):
            text = path.read_text(errors="replace")[-_TAIL:]
            steps += map(int, re.findall(r'"StepCommitted"[^\n]*?"step":(\d+)', text))
        return max(steps)

    # --- acts -------------------------------------------------------------------------------------------------------

    def _strike(self, launcher: int, blow: Blow, attempt: Attempt) -> None:
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            done = self._done(launcher, blow, attempt)
            self.log.append(f"{time.monotonic():.2f} {attempt.name} step {self._steps(attempt)}: {blow.act} {done}")
            if done:
                attempt.struck.append(blow.act)

    def _done(self, launcher: int, blow: Blow, attempt: Attempt) -> list[int]:
        """Carry out a blow; returns the processes that were struck."""
        if blow.act is Act.LOGOUT:
            for folder in (self.here.runtime, self._tmp):
                shutil.rmtree(folder, ignore_errors=True)
            return [0]
        if blow.act is Act.MOVE:
            return [0] if self._move(attempt) else []
        if blow.act in ENDING:
            attempt.asked = self._steps(attempt)
        struck = self._victims(launcher, blow.act, attempt)
        number = {Act.TERM: signal.SIGTERM}.get(blow.act, signal.SIGKILL)
        if blow.act in (Act.STOP, Act.STOP_AGENT, Act.STOP_LAUNCHER):
            number = signal.SIGSTOP
            self._continued += [(pid, time.monotonic() + blow.lasts) for pid in struck]
        for pid in struck:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        if number == signal.SIGKILL:
            self.kills += 1 if blow.act in (Act.AGENT, Act.POWER) else len(struck)
            ranks = self._plan.world // self._plan.nodes if blow.act is Act.AGENT else len(struck)
            attempt.killed += [time.monotonic()] * ranks
        return struck

    def _move(self, attempt: Attempt) -> bool:
        """Ask for a move; True if it is accepted."""
        plan = self._plan
        ranks, nodes = (
            [str(rank) for rank in range(plan.world)],
            [f"node{at}" for at in range(plan.nodes + plan.spares)],
        )
        return self.here.regrow("move", attempt.name, self._draw.choice(ranks + nodes)).returncode == 0

    def _victims(self, launcher: int, act: Act, attempt: Attempt) -> list[int]:
        if act in (Act.LAUNCHER, Act.STOP_LAUNCHER):
            return [launcher]
        below = {each.pid: named(each.pid) for each in psutil.Process(launcher).children(recursive=True)}
        if act in (Act.TERM, Act.POWER):
            return [launcher, *(pid for pid, name in below.items() if name.startswith("regrow-"))]
        role = {Act.ZYGOTE: "regrow-zygote", Act.WRITER: "regrow-writer"}
        role |= dict.fromkeys((Act.AGENT, Act.STOP_AGENT), "regrow-agent")
        ranks, standbys = workers(read_records(self.here.home / "jobs" / attempt.name))
        if act in role:
            found = [pid for pid, name in below.items() if name == role[act]]
        elif act is Act.STANDBY:
            found = standbys
        else:
            found = ranks if act is Act.TWO else ranks + standbys
            found = [pid for pid in found if pid in below]
        if act is Act.AGENT and len(found) < self._plan.nodes:
            return []
        return self._draw.sample(found, min(len(found), 2 if act is Act.TWO else 1))

    def _go_on(self, *, all_of_them: bool = False) -> None:
        now = time.monotonic()
        for each in [each for each in self._continued if all_of_them or each[1] <= now]:
            self._continued.remove(each)
            with contextlib.suppress(ProcessLookupError):
                os.kill(each[0], signal.SIGCONT)


def workers(records: Iterable[Record]) -> tuple[list[int], list[int]]:
    """The living processes of ranks, and of those on the way to be one; and those of standbys."""
    pids: dict[str, int] = {}
    waiting: set[str] = set()
    for record in records:
        match record:
            case WorkerSpawned(role=Role.STANDBY):
                waiting.add(record.worker)
            case WorkerForked():
                pids[record.worker] = record.pid
            case GenerationFormed():
                waiting.difference_update(record.workers.values())
            case WorkerGone():
                pids.pop(record.worker, None)
            case _:
                pass
    ranks = [pid for worker, pid in pids.items() if worker not in waiting]
    return ranks, [pid for worker, pid in pids.items() if worker in waiting]


@contextlib.contextmanager
def _busy(count: int) -> Iterator[None]:
    """Keep `count` processes busy meanwhile, each with all of a processor that it gets."""
    busy = [subprocess.Popen(["sh", "-c", "while :; do :; done"]) for _ in range(count)]
    try:
        yield
    finally:
        for each in busy:
            each.kill()
            each.wait()
