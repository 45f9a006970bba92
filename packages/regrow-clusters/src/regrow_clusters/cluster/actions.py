"""Actions that the planner asks of an adapter. Pure."""

import msgspec

from regrow.core.ids import Seconds


class StartGang(msgspec.Struct, frozen=True, tag=True):
    """Start the replicas of these places all or none: the job's first ones, or what is missing of them."""

    places: tuple[int, ...]
    avoid: tuple[str, ...] = ()


class StartReplica(msgspec.Struct, frozen=True, tag=True):
    """Start one replica that joins the job. `replacement`: of one that was lost, else growth."""

    place: int
    replacement: bool
    avoid: tuple[str, ...] = ()


class DrainReplica(msgspec.Struct, frozen=True, tag=True):
    """Ask a replica to leave within this time; it is released when it has, or when the time is over.

    `blame`: machines to avoid from now on.
    """

    name: str
    within: Seconds
    reason: str
    blame: tuple[str, ...] = ()


class ReleaseReplica(msgspec.Struct, frozen=True, tag=True):
    """Give back what the cluster still holds for a replica of which nothing runs any more.

    `blame`: machines to avoid from now on.
    """

    name: str
    reason: str
    blame: tuple[str, ...] = ()


PlannedAction = StartGang | StartReplica | DrainReplica | ReleaseReplica
