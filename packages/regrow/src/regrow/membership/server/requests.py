"""Requests of operators to a job's coordinator. They can be sent without a server."""

import msgspec

from regrow.core.ids import NodeId, Rank, Seconds


class ScaleRequest(msgspec.Struct, frozen=True):
    """`POST /scale`: change the job to this number of replicas, or of ranks; exactly one of the two is given.

    `stay`: time in seconds for which the capacity is expected to last; None: no end is known.
    """

    replicas: int | None = None
    ranks: int | None = None
    stay: Seconds | None = None
    reason: str = ""


class DrainRequest(msgspec.Struct, frozen=True):
    """`POST /drain`: give a node back within `grace` seconds.

    `certain`: the node is taken away in any case, so the job cannot refuse.
    """

    node: NodeId
    grace: Seconds = 30.0
    reason: str = ""
    certain: bool = False


class MoveRequest(msgspec.Struct, frozen=True):
    """`POST /move`: move the ranks of `node`, or only `rank`, to node `to`, or to any node with room.

    Exactly one of `node` and `rank` is given.
    """

    node: NodeId = NodeId("")
    rank: Rank | None = None
    to: NodeId | None = None
    reason: str = ""
