"""The job for people: what `regrow status` shows."""

import msgspec

from regrow.core.ids import Generation, NodeId, Rank, StepNo, WorkerId
from regrow.membership.roster import WorkerRecord


class WorkerView(msgspec.Struct, frozen=True):
    """One worker for people."""

    worker: WorkerId
    node: NodeId
    rank: Rank | None
    pid: int
    stage: str
    state_at: StepNo

    @classmethod
    def of(cls, worker: WorkerRecord) -> "WorkerView":
        """The worker as it is now."""
        return cls(worker.worker, worker.node, worker.rank, worker.pid, worker.stage.value, worker.state_at)


class JobView(msgspec.Struct, frozen=True):
    """The job for people."""

    job: str
    phase: str
    generation: Generation
    step: StepNo
    restarts: int
    incidents: int
    ranks: list[WorkerView]
    standbys: list[WorkerView]
