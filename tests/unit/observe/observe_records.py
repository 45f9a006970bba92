"""Records of a job that never ran, for the tests of `observe`."""

from collections.abc import Mapping

from regrow.core.ids import Generation, Instant, JobId, NodeId, Rank, Seconds, StepNo, WorkerId
from regrow.core.records import (
    FaultInjected,
    GenerationFormed,
    IncidentClosed,
    IncidentOpened,
    JobEnded,
    JobStarted,
    Record,
    StepCommitted,
    WorkerBuilt,
    WorkerForked,
    WorkerGone,
    WorkerSpawned,
)

NODE = NodeId("node0")


class Moment:
    """A clock that stands."""

    at: Instant = 0.0

    def now(self) -> Instant:
        return self.at


def commit(
    step: int,
    rank: int,
    at: Instant,
    *,
    generation: int = 1,
    seconds: Seconds = 0.5,
    loss: float = 1.0,
    adopted: bool = False,
    worker: str = "",
) -> StepCommitted:
    """One rank's commit."""
    return StepCommitted(
        at=at,
        step=StepNo(step),
        rank=Rank(rank),
        worker=WorkerId(worker or f"w{rank}"),
        generation=Generation(generation),
        seconds=seconds,
        metrics={"loss": loss},
        samples=8,
        adopted=adopted,
    )


class FakeJob:
    """Writes the records of a job whose faults are each mended by a standby in a quarter of a second."""

    mend: Seconds = 0.25

    def __init__(self, *, start: Instant = 0.0, world: int = 4, step: Seconds = 0.5) -> None:
        self.records: list[Record] = []
        self._now = start
        self._world = world
        self._step = step
        self._generation = 1
        self._incidents = 0
        self._made = 0
        self.workers = {rank: self._spawn("rank", rank) for rank in range(world)}

    def run(self, steps: int, kills: Mapping[int, int], *, code: int = 0) -> list[Record]:
        """Run `steps` steps, kill rank `kills[step]` in its step; all records in order of time."""
        first = JobStarted(self._now, JobId("job"), self._world, 1, 1, ["train.py"])
        self._now += 3.0
        self.records += [WorkerBuilt(self._now, worker, 2.5) for worker in self.workers.values()]
        self._form(0)
        standby = self._spawn("standby", self._world - 1)
        for step in range(steps):
            if step in kills:
                standby = self._kill(step, kills[step], standby)
            self._now += self._step
            for rank, worker in self.workers.items():
                loss, seconds, generation = 1 / (step + 1) + rank, self._step, self._generation
                self.records.append(
                    commit(step, rank, self._now, generation=generation, seconds=seconds, loss=loss, worker=worker)
                )
        last = JobEnded(self._now + 0.1, code, "")
        return [first, *sorted(self.records, key=lambda record: record.at), last]

    def _spawn(self, role: str, rank: int) -> WorkerId:
        worker = WorkerId(f"w{self._made}")
        self._made += 1
        self.records.append(WorkerSpawned(self._now, worker, NODE, role, Rank(rank), Generation(self._generation)))
        self.records.append(WorkerForked(self._now, worker, 4000 + self._made))
        return worker

    def _form(self, step: int) -> None:
        workers = {str(rank): worker for rank, worker in self.workers.items()}
        self.records.append(GenerationFormed(self._now, Generation(self._generation), StepNo(step), workers))

    def _kill(self, step: int, rank: int, standby: WorkerId) -> WorkerId:
        """Half a step in, one rank dies and the standby takes its place; returns the next standby."""
        self._now += self._step / 2
        self._incidents += 1
        fault, number, opened = self._now, self._incidents, self._now + 0.01
        dead, ranks = self.workers[rank], [Rank(rank)]
        place = (Generation(self._generation), StepNo(step), "exit", ranks, "killed by SIGKILL")
        self.records += [
            FaultInjected(fault, f"fault-{number}", dead, Rank(rank), StepNo(step), "backward", "sigkill"),
            WorkerGone(opened, dead, Rank(rank), -9, "killed by SIGKILL"),
            IncidentOpened(opened, number, *place),
        ]
        self._now += self.mend
        self._generation += 1
        self.workers[rank] = standby
        self._form(step)
        total = self.mend + self._step
        times = (0.01, 0.02, 0.06, self.mend - 0.09, self._step, total)
        self.records.append(
            IncidentClosed(self._now + self._step, number, *place, "standby", 1, *times, 0, 1 << 20, opened, fault)
        )
        return self._spawn("standby", self._world - 1)
