"""Observations of one job in its cluster: facts with times, without any cluster's words. Pure."""

from enum import StrEnum

import msgspec

from regrow.core.ids import Instant


class ReplicaStage(StrEnum):
    """Stage of a replica."""

    QUEUED = "queued"
    """It waits for capacity; nothing of it runs."""
    STARTING = "starting"
    """It has its machines; its processes do not run yet."""
    RUNNING = "running"
    LEAVING = "leaving"
    """It was asked to leave, by us or by the cluster."""
    LOST = "lost"
    """Its machines or processes are gone, or cannot be reached."""
    ENDED = "ended"
    """Its processes have ended while the job goes on."""


class JobStage(StrEnum):
    """Stage of the job."""

    NEW = "new"
    """Its gang is to be started, or is starting."""
    TRAINING = "training"
    BROKEN = "broken"
    """It cannot go on with the replicas it has: its coordinator is gone. Its gang is started anew."""
    OVER = "over"
    """It has succeeded, or failed for good; nothing is started any more."""
    STOPPED = "stopped"
    """It is to give all its machines back: deleted, or suspended."""


_HOLDS_MACHINES = frozenset({ReplicaStage.STARTING, ReplicaStage.RUNNING})
_COUNTS = _HOLDS_MACHINES | {ReplicaStage.QUEUED}


class ReplicaSeen(msgspec.Struct, frozen=True):
    """One replica, as the cluster shows it.

    `place`: from 0, the coordinator's, to `max_replica_count - 1`; the gang has the first ones.
    """

    name: str
    place: int
    stage: ReplicaStage
    since: Instant
    """Time when it came to this stage, or was first seen there."""
    nodes: tuple[str, ...] = ()
    leave_by: Instant | None = None
    """Of one that leaves: until when it may take."""
    safe_at: Instant | None = None
    """From when on certainly nothing of it runs: it has ended, or the lease that fences it is over. None: unknown."""
    to_blame: bool = False
    """Its end speaks against its machines: they are avoided for a while."""
    says: str = ""
    """Of one that starts: why it cannot, where that may be the job's own fault."""
    avoids: tuple[str, ...] = ()
    """Of one that waits: machines that it was asked to be kept away from, and so will never run on."""

    @property
    def counts(self) -> bool:
        """True if it is one of the job's present or coming replicas."""
        return self.stage in _COUNTS

    @property
    def waits(self) -> bool:
        """True if it is still to run."""
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
    """The size it has had or asked for: what is missing of it is replaced at once, what is beyond it is growth."""
    changed_at: Instant | None = None
    """Time of the last change of its replicas."""
    retry_at: Instant = 0.0
    """After failures: nothing is started before."""
    bad_nodes: tuple[AvoidedNode, ...] = ()
