"""Check that a job has enough slots without some of its nodes, by its coordinator's status. Pure."""

from collections.abc import Collection

import msgspec

from regrow.core.ids import NodeId
from regrow.membership.view import JobView


class TooFew(msgspec.Struct, frozen=True):
    """Number of replicas for which a job would have room, below its minimum."""

    room: int
    least: int

    def __str__(self) -> str:
        has = f"room for {self.room} replica{'' if self.room == 1 else 's'}"
        return f"the job would have {has}, and replicaCount is {self.least}: it would wait until another node comes"


def too_few_without(view: JobView, leaving: Collection[NodeId]) -> TooFew | None:
    """Room that would be left, if it is too little; None: the job can train on, or no rank is on these nodes."""
    if not any(worker.node in leaving for worker in view.ranks):
        return None
    stay = [each for each in view.nodes if not (each.away or each.draining or each.node in leaving)]
    room = sum(each.slots for each in stay) // view.unit
    return TooFew(room, view.min_replicas) if room < view.min_replicas else None
