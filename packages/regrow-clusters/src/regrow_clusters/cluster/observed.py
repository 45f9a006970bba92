"""Observations of one job in its cluster: facts with times, in terms that hold for every kind of cluster. Pure."""

from enum import StrEnum

import msgspec

from regrow.core.ids import Instant


class ReplicaStage(StrEnum):
    """Stage of a replica."""

    QUEUED = "queued"
    """It waits for capacity; none of its processes runs."""
    STARTING = "starting"
    """It has its machines; its processes do not run yet."""
    RUNNING = "running"
    LEAVING = "leaving"
    """It was asked to leave, by regrow or by the cluster."""
    LOST = "lost"
    """Its machines or processes are gone, or cannot be reached."""
    ENDED = "ended"
    """Its processes have ended while the job goes on."""


class JobStage(StrEnum):
    """Stage of the job."""

    NEW = "new"
    """Its gang has not started yet, or is starting."""
    TRAINING = "training"
    BROKEN = "broken"
    """It cannot go on with its replicas, because its coordinator is gone. Its gang is restarted."""
    OVER = "over"
    """It has succeeded or failed for good; no replica is started any more."""
    STOPPED = "stopped"
    """It was deleted or suspended, and must release all its machines."""


_HOLDS_MACHINES = frozenset({ReplicaStage.STARTING, ReplicaStage.RUNNING})
_COUNTS = _HOLDS_MACHINES | {ReplicaStage.QUEUED}


class ReplicaSeen(msgspec.Struct, frozen=True):
    """One replica, as the cluster shows it.

    `place`: from 0, the coordinator's, to `max_replica_count - 1`; the gang has the lowest places.
    """

    name: str
    place: int
    stage: ReplicaStage
    since: Instant
    """Time when it entered this stage, or was first seen in it."""
    nodes: tuple[str, ...] = ()
    leave_by: Instant | None = None
    """Deadline of a replica that leaves."""
    safe_at: Instant | None = None
    """Time from which certainly none of its processes runs: it ended, or its fencing lease is over. None: unknown."""
    to_blame: bool = False
    """Its end suggests that its machines are bad: they are avoided for a while."""
    says: str = ""
    """Reason why a starting replica cannot start, if the job itself may be the cause."""
    avoids: tuple[str, ...] = ()
    """Machines on which a waiting replica will never run, because it was requested with them excluded."""

    @property
    def counts(self) -> bool:
        """True if it counts as a replica of the job: it waits, starts or runs."""
        return self.stage in _COUNTS

    @property
    def waits(self) -> bool:
        """True if it does not run yet."""
        return self.stage in (ReplicaStage.QUEUED, ReplicaStage.STARTING)


class AvoidedNode(msgspec.Struct, frozen=True):
    """A machine that replicas are kept away from until a time."""

    node: str
    until: Instant
    reason: str = ""
    leave: bool = False
    """Move replicas off this node when capacity allows."""


class JobSeen(msgspec.Struct, frozen=True):
    """One job, as the cluster shows it."""

    stage: JobStage
    replicas: tuple[ReplicaSeen, ...] = ()
    granted: int = 0
    """Number of replicas that it has had or requested: up to it, lost ones are replaced at once; beyond is growth."""
    changed_at: Instant | None = None
    """Time of the last change of its replicas."""
    retry_at: Instant = 0.0
    """Time before which no replica is started, after failures."""
    bad_nodes: tuple[AvoidedNode, ...] = ()
