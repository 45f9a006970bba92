"""Requests of operators to a job's coordinator. Sending them needs no server."""

import msgspec

from regrow.core.ids import NodeId, Rank, Seconds


class ScaleRequest(msgspec.Struct, frozen=True):
    """`POST /scale`: the job shall have this number of replicas, or ranks; one of the two.

    `stay`: how long the capacity is expected to be there, in seconds; None: no end is known.
    """

    replicas: int | None = None
    ranks: int | None = None
    stay: Seconds | None = None
    reason: str = ""


class DrainRequest(msgspec.Struct, frozen=True):
    """`POST /drain`: a node is to be given back, within `grace` seconds.

    `certain`: it goes in any case, so the job cannot refuse.
    """

    node: NodeId
    grace: Seconds = 30.0
    reason: str = ""
    certain: bool = False


class MoveRequest(msgspec.Struct, frozen=True):
    """`POST /move`: the ranks of `node`, or `rank` alone, go on on node `to`, or where there is room.

    One of `node` and `rank` is given.
    """

    node: NodeId = NodeId("")
    rank: Rank | None = None
    to: NodeId | None = None
    reason: str = ""
