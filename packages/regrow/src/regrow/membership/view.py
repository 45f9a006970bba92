"""View of the job for people, as `regrow status` shows it."""

import msgspec

from regrow.core.ids import Generation, NodeId, Rank, StepNo, WorkerId
from regrow.membership.roster import NodeRecord, WorkerRecord


class WorkerView(msgspec.Struct, frozen=True):
    """View of one worker. `rank`: its own rank; for a candidate, its future rank; None for a standby."""

    worker: WorkerId
    node: NodeId
    rank: Rank | None
    pid: int
    stage: str
    state_at: StepNo

    @classmethod
    def of(cls, worker: WorkerRecord) -> "WorkerView":
        """View of the worker as it is now."""
        rank = worker.candidate_for if worker.candidate_for is not None else worker.rank
        return cls(worker.worker, worker.node, rank, worker.pid, worker.stage.value, worker.state_at)


class NodeView(msgspec.Struct, frozen=True):
    """View of one node. `buddy`: the node that keeps copies of its ranks' state; empty: none."""

    node: NodeId
    host: str
    domain: str
    away: bool
    buddy: str = ""
    corruptions: int = 0
    """Number of times that the state of a rank on the node was found to be wrong."""
    slots: int = 0
    """Number of ranks that the node can hold."""
    draining: bool = False
    """True if the node is being given back."""
    left: bool = False
    """True if the node was given back and has left."""
    quarantined: str = ""
    """Reason why the node gets no new workers while others have room; empty: it is not in quarantine."""
    verdicts: list[str] = []
    """Findings of the node's last examination, other than `ok`."""
    agent: str = ""
    """Address of the node's agent; a later agent of the node usually has other ports. Empty: not known."""

    @classmethod
    def of(cls, node: NodeRecord) -> "NodeView":
        """View of the node as it is now."""
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
    """View of the job."""

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
    """Number of replicas of the present world, or of the one that is being formed."""
    wanted: int = 0
    """Number of replicas wanted as soon as there is room."""
    min_replicas: int = 0
    max_replicas: int = 0
    changes: int = 0
    """Planned changes of the world; `incidents` are the faults."""
    unit: int = 1
    """Number of ranks of a replica."""
    candidates: list[WorkerView] = []
    """Workers that build for a larger world while the others train."""
    replaceable: str = ""
    """Evidence that newcomers compute the same as the ranks they replace, and the doubt about the result, if any."""
