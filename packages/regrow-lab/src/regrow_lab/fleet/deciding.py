"""Decision about an incident: the situation of a policy, and the remedy it chooses. Pure."""

from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple

from regrow_lab.fleet.scenario import PolicyTable, Recovers


class Trouble(StrEnum):
    """Trouble that can strike a job."""

    WORKER = "worker"
    HANG = "hang"
    NODE = "node"
    JOB = "job"
    DRAIN = "drain"
    """Nodes are announced to go."""
    GROW = "grow"
    """Nodes have come, and the world may be larger."""


class Situation(NamedTuple):
    """All that a decision depends on."""

    trouble: Trouble
    spare: bool
    """There are idle nodes for all that are lost."""
    standby: bool
    """There is a warm worker on the node."""
    elastic: bool
    """The world may be smaller."""
    survives: bool
    """All of the state is still in the memory of somebody."""


class Remedy(NamedTuple):
    """Remedy for a trouble."""

    rung: str
    waits: bool = False
    """Until a node is there."""
    resizes: bool = False
    """The world is another afterwards."""
    from_checkpoint: bool = False
    """All goes back to the last durable checkpoint."""


Decide = Callable[[Situation], Remedy]

RUNGS: dict[Recovers, str] = {
    "checkpoint-restart": "restart",
    "process-restart": "process",
    "in-process": "in-process",
}
"""The one way of those that know no others."""


def plainly(policy: PolicyTable) -> Decide:
    """Decision of every policy but regrow: the same for every trouble."""
    rung = RUNGS[policy.recovers]

    def decide(situation: Situation) -> Remedy:
        lacks = situation.trouble in (Trouble.NODE, Trouble.DRAIN) and not situation.spare
        resizes = situation.trouble is Trouble.GROW or (lacks and situation.elastic)
        back = not policy.from_peers or not situation.survives or situation.trouble is Trouble.JOB
        return Remedy(rung, waits=lacks and not resizes, resizes=resizes, from_checkpoint=back)

    return decide
