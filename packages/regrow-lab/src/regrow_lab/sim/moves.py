"""Requests of operators in the simulator, and the ranks that they move."""

from regrow.core.ids import NodeId, WorkerId
from regrow.core.messages import facts
from regrow.membership.machine import Membership
from regrow_lab.sim.faults import Wish


def asked(wish: Wish) -> facts.ScaleRequested | facts.MoveRequested:
    """Request of an operator."""
    if wish.what == "move":
        return facts.MoveRequested(NodeId(f"n{wish.node}"), wish.rank, None, "an operator asks for it")
    return facts.ScaleRequested(wish.replicas, "an operator asks for it", wish.stay)


def moved(machine: Membership, worker: WorkerId) -> bool:
    """True if a planned move has given the worker's rank to another."""
    moves = machine.incident is not None and machine.incident.kind == "move"
    return moves and worker not in machine.roster.places.values()
