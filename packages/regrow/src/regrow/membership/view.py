"""The job for people: what `regrow status` shows."""

import msgspec

from regrow.core.ids import Generation, NodeId, Rank, StepNo, WorkerId
from regrow.membership.roster import NodeRecord, WorkerRecord


class WorkerView(msgspec.Struct, frozen=True):
    """One worker for people. `rank`: its own; of a candidate, the one it will have; None for a standby."""

    worker: WorkerId
    node: NodeId
    rank: Rank | None
    pid: int
    stage: str
    state_at: StepNo

    @classmethod
    def of(cls, worker: WorkerRecord) -> "WorkerView":
        """The worker as it is now."""
        rank = worker.candidate_for if worker.candidate_for is not None else worker.rank
        return cls(worker.worker, worker.node, rank, worker.pid, worker.stage.value, worker.state_at)


class NodeView(msgspec.Struct, frozen=True):
    """One node for people. `buddy`: the node that keeps copies of its ranks' state; empty: none."""

    node: NodeId
    host: str
    domain: str
    away: bool
    buddy: str = ""
    corruptions: int = 0
    """Number of times that the state of a rank on it was found to be wrong."""
    slots: int = 0
    """Number of ranks that it can hold."""
    draining: bool = False
    """It is being given back."""
    left: bool = False
    """It was given back, and has left."""
    quarantined: str = ""
    """Why it gets no new workers while there is room elsewhere; empty: it does."""
    verdicts: list[str] = []
    """Findings of its last examination, other than `ok`."""
    agent: str = ""
    """Address of its agent: another agent of the node has other ports as a rule. Empty: not known."""

    @classmethod
    def of(cls, node: NodeRecord) -> "NodeView":
        """The node as it is now."""
        return cls(
            node.node,
            node.host,
            node.domain,
            node.away,
            node.buddy or "",
            node.corruptions,
            node.slots,
            draining=node.leave_by is not None and not node.away,
            left=node.away and (node.stopped or node.leave_by is not None),
            quarantined=node.quarantined,
            verdicts=node.verdicts,
            agent=f"{node.store} {node.copy_endpoint}".strip(),
        )


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
    nodes: list[NodeView] = []
    replicas: int = 0
    """Of the present world, or of the one that is being formed."""
    wanted: int = 0
    """Number wanted when there is room."""
    min_replicas: int = 0
    max_replicas: int = 0
    unit: int = 1
    """Ranks of a replica."""
    candidates: list[WorkerView] = []
    """Those that build for a larger world while the others train."""
    replaceable: str = ""
    """Evidence that newcomers compute the same as the ranks they replace, and why the result is not proven, if so."""
