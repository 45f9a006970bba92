"""Pause of those who stay while ranks move to a spare node, by the size of the state; equality with a run without.

    python benchmarks/moves.py              # 30 and 300 MB, about 6 minutes
    python benchmarks/moves.py --quick      # the same with fewer moves, about 3 minutes
    python benchmarks/moves.py --large      # 3 GB too: more than 24 GB of memory

Two nodes of one rank each, and a spare. Their ranks move to the spare node one after the other, so each node is the
spare in turn; every element of the state changes in every step. *Pause* is the time from the last step that a rank
which stays has committed before a move to its first one beyond it, minus a median step before, each without its sleep.
Its stages are those of the job's records, whose total has a whole step in it; *hydrate* is the time
in which the newcomer receives the state. The same job without moves is what the result has to be equal to.

Exits with 1 when a move did not come about, a step ran again, or the result is another.
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median

from contest import Job, JobStuck
from moves_training import sleep_of
from targets import tell, warn_if_busy

from regrow.core.errors import RegrowError
from regrow.core.ids import NodeId, Rank
from regrow.core.records import IncidentClosed, StepCommitted
from regrow.launch.folder import read_entry
from regrow.launch.remote import CoordinatorClient
from regrow.membership.server.requests import MoveRequest
from regrow.membership.view import JobView

HERE = Path(__file__).resolve().parent
STAGES = ("detect", "abort", "regroup", "hydrate", "redo")
SIZES = {"30mb": 30.0, "300mb": 300.0, "3gb": 3000.0}
PACE = 0.3
DEADLINE = 400.0
SETTLE = 6
"""Steps between two moves."""


@dataclass
class SizeMeasured:
    """Moves of a job. `pauses`: of a rank that stayed, in seconds."""

    pauses: list[float] = field(default_factory=list)
    records: list[IncidentClosed] = field(default_factory=list)
    step: float = 0.0
    redone: int = 0
    equal: bool = False


class MovedJob(Job):
    """`moves_training.py` on two nodes and a spare."""

    def __init__(self, folder: Path, name: str, state_mb: float, steps: int, *, pace: float) -> None:
        self.folder, self.steps = folder / name, steps
        self.folder.mkdir()
        command = [sys.executable, "-m", "regrow", "run", "--local-nodes=3", "--spares=1", "--nproc-per-node=1"]
        command += ["--hang-timeout=10min", f"--job={name}", "--quiet", str(HERE / "moves_training.py")]
        command += [f"--steps={steps}", f"--state-mb={state_mb}", f"--pace={pace}", f"--out={self.folder / 'out'}"]
        command += [f"--hurry={self.folder / 'hurry'}"]
        environment = {"OMP_NUM_THREADS": "1", "REGROW_HOME": str(self.folder)}
        records = self.folder / "jobs" / name
        super().__init__(name, command, records=records, log=folder / f"{name}.log", world=2, environment=environment)
        self._records = records

    @property
    def newest(self) -> int:
        """Newest step that both ranks have committed."""
        return max((step for step, ranks in self.ledger.commits.items() if len(ranks) == 2), default=-1)

    def view(self) -> JobView:
        """The job as `regrow status` shows it."""
        return self._client().status()

    def move(self, rank: int) -> None:
        """Move the node of a rank, and wait until it trains elsewhere. Raises `JobStuck`."""
        self.wait(self._spare_is_warm, deadline=DEADLINE, what="warm spare node")
        home = {worker.rank: worker.node for worker in self.view().ranks}[Rank(rank)]
        before = len(self.ledger.incidents)
        answer = self._client().move(MoveRequest(NodeId(home), reason="the benchmark asks for it"))
        if not answer.accepted:
            raise JobStuck(f"{self.name}: {answer.reason}")
        self.wait(lambda: len(self.ledger.incidents) > before, deadline=DEADLINE, what="end of a move")
        reached = self.newest
        self.wait(lambda: self.newest >= reached + SETTLE, deadline=DEADLINE, what="steps after a move")

    def finish(self) -> list[str]:
        """Let it come to its end; the digests of its ranks."""
        (self.folder / "hurry").touch()
        self.wait(lambda: self.newest >= self.steps - 1, deadline=1200, what="last step")
        outs = [self.folder / f"out.{rank}.json" for rank in range(2)]
        self.wait(lambda: all(out.exists() for out in outs), deadline=DEADLINE, what="digests of the state")
        self.look()
        return [str(json.loads(out.read_text())["digest"]) for out in outs]

    def _spare_is_warm(self) -> bool:
        view = self.view()
        busy = {worker.node for worker in view.ranks}
        return any(each.stage == "ready" and each.node not in busy for each in view.standbys)

    def _client(self) -> CoordinatorClient:
        entry = read_entry(self._records)
        if entry is None:
            raise JobStuck(f"{self.name}: {self._records} has no description of the job")
        return CoordinatorClient(entry.address, entry.token)


def measure(folder: Path, name: str, state_mb: float, *, moves: int, steps: int) -> SizeMeasured:
    """Move the ranks in turns, and compare with the run without."""
    measured = SizeMeasured()
    with MovedJob(folder, f"moved-{name}", state_mb, steps, pace=PACE) as job:
        job.wait(lambda: job.newest >= SETTLE, deadline=DEADLINE, what="first steps")
        for number in range(moves):
            job.move(number % 2)
        digests = job.finish()
        ledger = job.ledger
    with MovedJob(folder, f"still-{name}", state_mb, steps, pace=0.0) as still:
        expected = still.finish()
        losses = all(
            commit.metrics == still.ledger.commits[step][rank].metrics
            for step, ranks in ledger.commits.items()
            for rank, commit in ranks.items()
        )
    measured.equal = digests == expected and len(set(digests)) == 1 and losses
    measured.records = [each for each in ledger.incidents if each.kind == "move"]
    measured.redone = sum(each.steps_lost for each in ledger.incidents)
    measured.redone += sum(len(commits) > 1 for commits in ledger.history.values())
    commits = sorted(
        (each for history in ledger.history.values() for each in history if not each.adopted), key=lambda each: each.at
    )
    for number, incident in enumerate(measured.records):
        stayed = [commit for commit in commits if commit.rank == (number + 1) % 2]
        measured.step, pause = pause_of(stayed, incident.generation, lambda step: sleep_of(PACE, step, steps))
        measured.pauses.append(pause)
    return measured


def pause_of(commits: list[StepCommitted], generation: int, sleep: Callable[[int], float]) -> tuple[float, float]:
    """A median step before a move, less its sleep, and what a rank's first step behind it has lasted beyond that.

    Steps before, as the first ones behind a move are slower: the newcomer touches its memory for the first time.

    Args:
        commits: of a rank that was there before, too, in order of time.
        generation: the one that begins with the move.
        sleep: seconds of a step by its number.
    """
    earlier = [each for each in commits if each.generation < generation]
    first = next(each for each in commits if each.generation == generation)
    own = [b.at - a.at - sleep(b.step) for a, b in pairwise([*earlier, first])]
    step = median(own[:-1][-SETTLE:])
    return step, own[-1] - step


def show(name: str, measured: SizeMeasured) -> None:
    """Print a size."""
    stages = ", ".join(f"{stage} {median(getattr(each, stage) for each in measured.records):.3f}" for stage in STAGES)
    total = median(each.total for each in measured.records)
    print(
        f"{name}: {len(measured.pauses)} moves, pause median {median(measured.pauses):.3f} s "
        f"({min(measured.pauses):.3f} to {max(measured.pauses):.3f}), a step {measured.step:.3f} s without its sleep; "
        f"by the records {total:.3f} s with the first step: {stages}; {measured.redone} steps again; "
        f"{'the bits are the same' if measured.equal else 'THE RESULT IS ANOTHER'}",
        flush=True,
    )


def figures(found: dict[str, SizeMeasured]) -> Iterator[tuple[str, float]]:
    """The numbers for `--json`."""
    for name, measured in found.items():
        yield f"move_pause_s_{name}", median(measured.pauses)
        for stage in STAGES:
            yield f"move_{stage}_s_{name}", median(getattr(each, stage) for each in measured.records)
    yield "steps_again", float(sum(each.redone for each in found.values()))
    yield "bitwise_equal", float(all(each.equal for each in found.values()))


def main() -> int:
    """Measure, print, write; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="4 moves of each size instead of 10")
    parser.add_argument("--large", action="store_true", help="3 GB of state too")
    parser.add_argument("--only", choices=[*SIZES], action="append", help="these sizes; repeatable")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    warn_if_busy()
    names = args.only or [name for name in SIZES if args.large or name != "3gb"]
    folder, found, stuck = Path(tempfile.mkdtemp(prefix="regrow-moves-")), dict[str, SizeMeasured](), ""
    for name in names:
        try:
            moves = 4 if args.quick or name == "3gb" else 10
            steps = moves * (60 if name == "30mb" else 24)
            found[name] = measure(folder, name, SIZES[name], moves=moves, steps=steps)
        except (JobStuck, RegrowError) as error:
            stuck = f"{name}: {error}"
            print(f"did not come about: {stuck}")
            continue
        show(name, found[name])
    tell("moves", dict(figures(found)), args.json)
    if stuck or not all(each.equal and not each.redone for each in found.values()):
        print(f"records and output are kept in {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
