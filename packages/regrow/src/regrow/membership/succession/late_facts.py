"""Facts that are dealt with later than they came, several in one go: what they still mean by then. Pure.

A coordinator that may have been deposed keeps facts until it knows better, and so does one that asks the agents first.
"""

from collections.abc import Sequence

import msgspec

from regrow.core.ids import Seconds
from regrow.core.messages import facts, orders
from regrow.core.messages.tables import JoinGeneration
from regrow.core.messages.unions import Fact, NodeOrder, WorkerOrder
from regrow.membership.orders import Command


def aged(fact: Fact, late: Seconds) -> Fact:
    """The fact after a delay of `late`: the time of a node that is given back, or of a job that is to stop, has run."""
    if isinstance(fact, facts.NodeDraining | facts.DrainRequested):
        return msgspec.structs.replace(fact, grace=max(0.0, fact.grace - late))
    if isinstance(fact, facts.StopRequested):
        return msgspec.structs.replace(fact, patience=max(0.0, fact.patience - late))
    return fact


def says_all_of(later: Fact, fact: Fact) -> bool:
    """True if a later fact says all that a waiting one says, so that long queues stay short."""
    match fact, later:
        case facts.TimeAdvanced(), facts.TimeAdvanced():
            return True
        case facts.NodeProgress(), facts.NodeProgress():
            newer = {commit.worker for commit in later.commits}
            return fact.node == later.node and all(commit.worker in newer for commit in fact.commits)
    return False


def still_meant(commands: Sequence[Command], fact: Fact) -> list[Command]:
    """Of the commands that nobody has carried out yet, those that stand after this fact.

    What an agent was to do is not for the next one of its node, which may have come before the commands are sent: it
    would start a worker that is known to be lost with the first, or end itself in the place of that one.
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
