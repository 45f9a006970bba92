"""The present ranks and states of a job's workers, from its records. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from regrow.core.ids import Generation, Instant, Rank, Seconds, StepNo, WorkerId
from regrow.core.messages.vocabulary import Role
from regrow.core.records import (
    GenerationFormed,
    IncidentClosed,
    IncidentOpened,
    JobEnded,
    Record,
    StepCommitted,
    WorkerBuilt,
    WorkerForked,
    WorkerGone,
    WorkerSpawned,
)
from regrow.observe.ledger import Ledger


class WorkerState(StrEnum):
    """Activity of a worker."""

    STARTING = "starting"
    WARM = "warm"
    TRAINING = "training"
    MENDING = "mending"
    LOST = "lost"
    DONE = "done"


@dataclass(slots=True)
class WorkerSeen:
    """All that the records contain about one worker."""

    worker: WorkerId
    role: str
    rank: Rank | None = None
    pid: int | None = None
    generation: Generation | None = None
    state: WorkerState = WorkerState.STARTING
    step: StepNo | None = None
    step_s: Seconds | None = None
    built_s: Seconds | None = None


@dataclass(slots=True)
class Scene:
    """The present state of a job. Update it with `add`."""

    ledger: Ledger = field(default_factory=Ledger)
    places: dict[Rank, WorkerSeen] = field(default_factory=dict)
    """The present, or last, worker of each rank."""
    workers: dict[WorkerId, WorkerSeen] = field(default_factory=dict)
    """All workers whose process has not ended."""

    def add(self, record: Record) -> None:
        """Add one record."""
        self.ledger.add(record)
        match record:
            case WorkerSpawned():
                self._spawned(record)
            case WorkerForked():
                self._worker(record.worker).pid = record.pid
            case WorkerBuilt():
                worker = self._worker(record.worker)
                worker.built_s = record.seconds
                if worker.state is WorkerState.STARTING:
                    worker.state = WorkerState.WARM
            case WorkerGone():
                self._gone(record)
            case GenerationFormed():
                self._formed(record)
            case IncidentOpened():
                self._faulted(record)
            case StepCommitted():
                self._committed(record)
            case IncidentClosed():
                self._set_places(WorkerState.MENDING, WorkerState.TRAINING)
            case JobEnded():
                for worker in self.places.values():
                    worker.state = WorkerState.DONE if record.code == 0 else WorkerState.LOST
            case _:
                pass

    def add_all(self, records: Iterable[Record]) -> None:
        """Add records, oldest first."""
        for record in records:
            self.add(record)

    @property
    def standbys(self) -> list[WorkerSeen]:
        """The running workers without a rank, except a worker that was made only for a proof."""
        placed = {worker.worker for worker in self.places.values()}
        others = (worker for worker in self.workers.values() if worker.role != Role.PROVER)
        return [worker for worker in others if worker.worker not in placed]

    @property
    def step(self) -> StepNo:
        """The step in progress: the step after the newest one that any rank committed."""
        last = self.ledger.last_step
        return StepNo(0 if last is None else last + 1)

    def elapsed(self, now: Instant) -> Seconds:
        """Seconds since the job started, up to its end."""
        started, ended = self.ledger.started, self.ledger.ended
        if started is None:
            return 0.0
        return max(0.0, (ended.at if ended is not None else now) - started.at)

    def steps_per_second(self, *, over: int = 20) -> float | None:
        """Steps per second of the whole world over its last `over` steps; None before the second step."""
        times = self.ledger.world_commits(newest=over + 1)
        if len(times) < 2 or times[-1][1] <= times[0][1]:
            return None
        return (len(times) - 1) / (times[-1][1] - times[0][1])

    def samples_per_step(self) -> int:
        """Samples of the whole world in its newest step; 0 if ranks do not count them."""
        newest = self.ledger.world_commits(newest=1)
        return sum(c.samples for c in self.ledger.commits[newest[0][0]].values()) if newest else 0

    def _worker(self, worker: WorkerId) -> WorkerSeen:
        return self.workers.setdefault(worker, WorkerSeen(worker, role=""))

    def _spawned(self, record: WorkerSpawned) -> None:
        worker = self._worker(record.worker)
        worker.role, worker.generation = record.role, record.generation
        if record.role == Role.RANK:
            worker.rank = record.rank
            self.places[record.rank] = worker

    def _gone(self, record: WorkerGone) -> None:
        worker = self.workers.pop(record.worker, None)
        if worker is not None and worker.state is not WorkerState.DONE:
            worker.state = WorkerState.LOST if record.code != 0 else WorkerState.DONE

    def _formed(self, record: GenerationFormed) -> None:
        for rank, name in record.workers.items():
            worker = self._worker(name)
            worker.rank, worker.generation = Rank(int(rank)), record.generation
            worker.state = WorkerState.TRAINING
            self.places[worker.rank] = worker

    def _faulted(self, record: IncidentOpened) -> None:
        self._set_places(WorkerState.TRAINING, WorkerState.MENDING)
        for rank in record.ranks:
            if rank in self.places and self.places[rank].state is not WorkerState.LOST:
                self.places[rank].state = WorkerState.LOST

    def _committed(self, record: StepCommitted) -> None:
        worker = self.workers.get(record.worker)
        if worker is None:
            return
        worker.step = record.step
        worker.rank = record.rank
        if not record.adopted:
            worker.step_s = record.seconds

    def _set_places(self, old: WorkerState, new: WorkerState) -> None:
        for worker in self.places.values():
            if worker.state is old:
                worker.state = new
