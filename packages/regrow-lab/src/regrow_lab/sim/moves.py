"""Operators' requests in the simulator, and the ranks that they move."""

from regrow.core.ids import NodeId, WorkerId
from regrow.core.messages import facts
from regrow.membership.machine import Membership
from regrow_lab.sim.faults import SimRequest


def asked(request: SimRequest) -> facts.ScaleRequested | facts.MoveRequested:
    """The fact for an operator's request."""
    if request.what == "move":
        return facts.MoveRequested(NodeId(f"n{request.node}"), request.rank, None, "an operator asks for it")
    return facts.ScaleRequested(request.replicas, "an operator asks for it", request.stay)


def moved(machine: Membership, worker: WorkerId) -> bool:
    """True if a planned move has given the worker's rank to another."""
    moves = machine.incident is not None and machine.incident.kind == "move"
    return moves and worker not in machine.roster.places.values()
