"""Actions that the planner asks of an adapter. Pure."""

import msgspec

from regrow.core.ids import Seconds


class StartGang(msgspec.Struct, frozen=True, tag=True):
    """Start the replicas of these places, all or none: the whole gang, or its missing members."""

    places: tuple[int, ...]
    avoid: tuple[str, ...] = ()


class StartReplica(msgspec.Struct, frozen=True, tag=True):
    """Start one replica that joins the job. `replacement`: it replaces a lost replica; else the job grows."""

    place: int
    replacement: bool
    avoid: tuple[str, ...] = ()


class DrainReplica(msgspec.Struct, frozen=True, tag=True):
    """Ask a replica to leave within this time; it is released when it has left, or when the time is over.

    `blame`: machines to avoid from now on.
    """

    name: str
    within: Seconds
    reason: str
    blame: tuple[str, ...] = ()


class ReleaseReplica(msgspec.Struct, frozen=True, tag=True):
    """Release the cluster's resources of a replica whose processes have all ended.

    `blame`: machines to avoid from now on.
    """

    name: str
    reason: str
    blame: tuple[str, ...] = ()


PlannedAction = StartGang | StartReplica | DrainReplica | ReleaseReplica
