"""A long run with incidents of all kinds: growth of its resources, and equality with an undisturbed run.

    python benchmarks/endurance.py            # 20,000 steps, an incident every 300
    python benchmarks/endurance.py --quick    # 4,000 steps, an incident every 250: 10 minutes on busy cores

Two replicas on two nodes of this machine, a spare node, a standby on each, a durable checkpoint every 10 s. In turns a
worker is killed, a worker hangs, the ranks of a node move to the spare one, and the world shrinks to one replica and
grows to two. After each tenth of the run, memory, descriptors and threads of the launcher and the agents, which live
throughout, are measured, and all processes, shared memory and files of the job are counted. *Growth* is the slope of a
line through the last eight of the ten measurements, over their time, relative to their mean.

A step lasts a second during an incident, so that the job has recovered before the next one.

Exits with 1 if the job did not finish, or its result differs.
"""

import argparse
import itertools
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, linear_regression, median

import psutil
from contest import Job, JobStuck
from targets import tell, warn_if_busy

from regrow.core.errors import RegrowError
from regrow.core.ids import NodeId, Rank
from regrow.core.messages.vocabulary import FaultHow, FaultSpec, FaultStage
from regrow.launch.folder import read_entry
from regrow.launch.remote import CoordinatorClient
from regrow.membership.server.requests import MoveRequest, ScaleRequest

HERE = Path(__file__).resolve().parent
TENTHS = 10
WARM = 2
"""Measurements that are left out of a slope."""
DEADLINE = 180.0
HANG_S = 10
KINDS = ("kill", "hang", "move", "shrink", "grow")


@dataclass
class Look:
    """One measurement: memory, descriptors and threads of launcher and agents; the rest of the whole job."""

    memory_mb: float
    descriptors: float
    threads: float
    processes: float
    shared_files: float
    files: float
    records_a_step: float


@dataclass
class LongRun:
    """Results of the disturbed run."""

    looks: list[Look] = field(default_factory=list)
    incidents: dict[str, int] = field(default_factory=dict)
    steps: list[float] = field(default_factory=list)
    """Median step time of each tenth."""
    again: int = 0
    equal: bool = False


class LongJob(Job):
    """`endurance_training.py` on two nodes and a spare."""

    def __init__(self, folder: Path, name: str, steps: int, *, every: int | None = None) -> None:
        self.folder, self.steps, self.out = folder / name, steps, folder / name / "out.json"
        self.go = self.folder / "go"
        self.go.mkdir(parents=True)
        command = [sys.executable, "-m", "regrow", "run", "--local-nodes=3", "--spares=1", "--nproc-per-node=1"]
        command += ["--replicas=1:2", "--standby=1", f"--hang-timeout={HANG_S}s", "--max-faults=100000"]
        command += [f"--checkpoint-dir={self.folder / 'checkpoints'}", "--checkpoint-every=10s", f"--job={name}"]
        command += ["--quiet", str(HERE / "endurance_training.py"), f"--steps={steps}", f"--out={self.out}"]
        command += [] if every is None else [f"--hold={self.go}", f"--every={every}"]
        environment = {"OMP_NUM_THREADS": "1", "REGROW_HOME": str(self.folder)}
        self.records = self.folder / "jobs" / name
        super().__init__(
            name, command, records=self.records, log=folder / f"{name}.log", world=2, environment=environment
        )

    @property
    def newest(self) -> int:
        """Newest step that any rank has committed."""
        return -1 if self.ledger.last_step is None else self.ledger.last_step

    def disturb(self, kind: str, number: int) -> None:
        """Cause an incident, and wait for its end. Raises `JobStuck`."""
        self.wait(self._calm, deadline=DEADLINE, what=f"calm before {kind} {number}")
        before, client = len(self.ledger.incidents), self._client()
        view = client.status()
        if kind in ("kill", "hang"):
            how = FaultHow.SIGKILL if kind == "kill" else FaultHow.SIGSTOP
            client.kill(FaultSpec(f"endurance-{number}", Rank(number % len(view.ranks)), how, FaultStage.NOW))
        elif kind == "move":
            busy = sorted({worker.node for worker in view.ranks})
            answer = client.move(MoveRequest(NodeId(busy[number % len(busy)]), reason="the benchmark asks for it"))
            if not answer.accepted:
                raise JobStuck(f"move {number}: {answer.reason}")
        else:
            client.scale(ScaleRequest(replicas=1 if kind == "shrink" else 2, reason="the benchmark asks for it"))
        self.wait(lambda: len(self.ledger.incidents) > before, deadline=DEADLINE, what=f"end of {kind} {number}")

    def look_at_it(self) -> Look:
        """Measure the job's resources."""
        launcher = psutil.Process(self._process.pid)  # type: ignore[union-attr]
        family = launcher.children(recursive=True)
        agents = [each for each in family if self._is_agent(each)]
        kept = [launcher, *agents]
        records = sum(path.stat().st_size for path in self.records.rglob("*.jsonl"))
        return Look(
            sum(each.memory_info().rss for each in kept) / 1e6,
            sum(each.num_fds() for each in kept),
            sum(each.num_threads() for each in kept),
            len(family) + 1,
            sum(1 for _ in Path("/dev/shm").glob("regrow-*")),
            sum(1 for path in self.folder.rglob("*") if not {"checkpoints", "go"} & {*path.parts}),
            records / max(1, self.newest),
        )

    def finish(self) -> str:
        """Wait for the job's end; returns the digest of its result."""
        self.wait(lambda: self.newest >= self.steps - 1, deadline=3600.0, what="last step")
        self.wait(lambda: self.ledger.ended is not None, deadline=DEADLINE, what="end of the job")
        return str(json.loads(self.out.read_text())["digest"])

    def _is_agent(self, process: psutil.Process) -> bool:
        try:
            words = process.cmdline()
        except psutil.Error:
            return False
        return "regrow.agent" in words

    def _calm(self) -> bool:
        view = self._client().status()
        warm = all(each.stage in ("ready", "idle") for each in view.standbys) and len(view.standbys) >= len(view.nodes)
        return view.phase == "training" and warm and not self.ledger.open_incidents and not view.candidates

    def _client(self) -> CoordinatorClient:
        entry = read_entry(self.records)
        if entry is None:
            raise JobStuck(f"{self.name}: {self.records} has no description of the job")
        return CoordinatorClient(entry.address, entry.token)


def long_run(folder: Path, *, steps: int, every: int) -> LongRun:
    """Run the disturbed job and the undisturbed one."""
    found, kinds = LongRun(), itertools.cycle(KINDS)
    with LongJob(folder, "disturbed", steps, every=every) as job:
        (job.go / "0").touch()
        job.wait(lambda: job.newest >= 10, deadline=DEADLINE, what="first steps")
        for number, at in enumerate(range(every, steps, every)):
            job.wait(lambda at=at: job.newest >= at, deadline=1200.0, what=f"step {at}")  # type: ignore[misc]
            while len(found.looks) < TENTHS * at // steps:
                found.looks.append(job.look_at_it())
                print(f"  step {at:,}: {found.looks[-1]}", flush=True)
            kind = next(kinds)
            job.disturb(kind, number)
            found.incidents[kind] = found.incidents.get(kind, 0) + 1
            (job.go / str(at // every)).touch()
        digest, ledger = job.finish(), job.ledger
    with LongJob(folder, "undisturbed", steps) as calm:
        found.equal = calm.finish() == digest
    found.again = sum(each.steps_lost for each in ledger.incidents)
    own = [ledger.commits[step][Rank(0)] for step in sorted(ledger.commits) if Rank(0) in ledger.commits[step]]
    for tenth in range(TENTHS):
        some = own[len(own) * tenth // TENTHS : len(own) * (tenth + 1) // TENTHS]
        found.steps.append(median(b.at - a.at for a, b in itertools.pairwise(some)))
    return found


def growth(values: list[float]) -> float:
    """Growth over all measurements but the first ones, relative to their mean."""
    kept = values[WARM:]
    if len(kept) < 3 or not fmean(kept):
        return 0.0
    slope = linear_regression(range(len(kept)), kept).slope
    return slope * (len(kept) - 1) / fmean(kept)


def figures(found: LongRun, steps: int) -> Iterator[tuple[str, float]]:
    """The numbers for `--json`."""
    yield "steps", float(steps)
    yield "incidents", float(sum(found.incidents.values()))
    yield "steps_again", float(found.again)
    yield "bitwise_equal", float(found.equal)
    for name in Look.__dataclass_fields__:
        yield f"{name}_growth", growth([getattr(each, name) for each in found.looks])
    yield "step_time_growth", growth(found.steps)


def main() -> int:
    """Measure, print, write; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--every", type=int, default=300, help="steps between two incidents")
    parser.add_argument("--quick", action="store_true", help="4,000 steps, an incident every 250")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    warn_if_busy()
    steps, every = (4_000, 250) if args.quick else (args.steps, args.every)
    folder = Path(tempfile.mkdtemp(prefix="regrow-endurance-"))
    try:
        found = long_run(folder, steps=steps, every=every)
    except (JobStuck, RegrowError) as error:
        print(f"did not come to its end: {error}; records and output are kept in {folder}")
        return 1
    told = dict(figures(found, steps))
    for name, value in told.items():
        print(f"{name}: {value:.4g}" if not name.endswith("growth") else f"{name}: {100 * value:+.2f} %")
    print(f"incidents: {found.incidents}; a step by tenths, in ms: {[round(1000 * each, 1) for each in found.steps]}")
    tell("endurance", told, args.json)
    if not found.equal:
        print(f"the result is another; records and output are kept in {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
