"""Decision about an incident: the situation, and the remedy that a policy chooses. Pure."""

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
    """Nodes are announced to leave."""
    GROW = "grow"
    """Nodes have been added, and the world may grow."""


class Situation(NamedTuple):
    """All that a decision depends on."""

    trouble: Trouble
    spare: bool
    """There are idle nodes for all lost ones."""
    standby: bool
    """There is a warm worker on the node."""
    elastic: bool
    """The world may shrink."""
    survives: bool
    """All of the state is still in the memory of the survivors."""


class Remedy(NamedTuple):
    """Remedy for a trouble."""

    rung: str
    waits: bool = False
    """The recovery waits until a node is available."""
    resizes: bool = False
    """The size of the world changes."""
    from_checkpoint: bool = False
    """The whole job goes back to the last durable checkpoint."""


Decide = Callable[[Situation], Remedy]

RUNGS: dict[Recovers, str] = {
    "checkpoint-restart": "restart",
    "process-restart": "process",
    "in-process": "in-process",
}
"""The one rung of each policy other than regrow's."""


def plainly(policy: PolicyTable) -> Decide:
    """Decision of every policy but regrow's: the same rung for every trouble."""
    rung = RUNGS[policy.recovers]

    def decide(situation: Situation) -> Remedy:
        lacks = situation.trouble in (Trouble.NODE, Trouble.DRAIN) and not situation.spare
        resizes = situation.trouble is Trouble.GROW or (lacks and situation.elastic)
        back = not policy.from_peers or not situation.survives or situation.trouble is Trouble.JOB
        return Remedy(rung, waits=lacks and not resizes, resizes=resizes, from_checkpoint=back)

    return decide
