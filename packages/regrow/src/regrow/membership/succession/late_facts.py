"""Meaning of facts that are handled some time after they arrived, several of them together. Pure.

A coordinator that may be deposed keeps facts until that is decided; a new one, until the agents have reported.
"""

from collections.abc import Sequence

import msgspec

from regrow.core.ids import Seconds
from regrow.core.messages import facts, orders
from regrow.core.messages.tables import JoinGeneration
from regrow.core.messages.unions import Fact, NodeOrder, WorkerOrder
from regrow.membership.orders import Command


def aged(fact: Fact, late: Seconds) -> Fact:
    """A fact as it is after a delay of `late`, which shortens the grace of a drain and the patience of a stop."""
    if isinstance(fact, facts.NodeDraining | facts.DrainRequested):
        return msgspec.structs.replace(fact, grace=max(0.0, fact.grace - late))
    if isinstance(fact, facts.StopRequested):
        return msgspec.structs.replace(fact, patience=max(0.0, fact.patience - late))
    return fact


def says_all_of(later: Fact, fact: Fact) -> bool:
    """True if a later fact makes a waiting one superfluous; such facts are dropped to keep queues short."""
    match fact, later:
        case facts.TimeAdvanced(), facts.TimeAdvanced():
            return True
        case facts.NodeProgress(), facts.NodeProgress():
            newer = {commit.worker for commit in later.commits}
            return fact.node == later.node and all(commit.worker in newer for commit in fact.commits)
    return False


def still_meant(commands: Sequence[Command], fact: Fact) -> list[Command]:
    """The commands, not carried out yet, that remain valid after this fact.

    Orders to a lost agent must not reach the node's next agent, which may connect before they are sent: it would start
    a worker that counts as lost with the first agent, or end itself in place of that agent.
    """
    if not isinstance(fact, facts.NodeLost | facts.NodeStopped):
        return list(commands)
    unborn = {order.worker for order in commands if isinstance(order, orders.SpawnWorker) and order.node == fact.node}
    return [
        command
        for command in commands
        if not (isinstance(command, NodeOrder) and command.node == fact.node)
        and not (isinstance(command, WorkerOrder | JoinGeneration) and command.worker in unborn)
    ]
