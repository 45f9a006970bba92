"""Faults of a simulated job, and requests to it."""

from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

from regrow.core.ids import NodeId, Rank, Seconds, WorkerId
from regrow.core.messages.vocabulary import ErrorReport
from regrow_lab.sim.copies import SimCopies
from regrow_lab.sim.disk import SimDisk
from regrow_lab.sim.script import IN_STEP, Doing
from regrow_lab.sim.workers import SimWorker


class SimFault(msgspec.Struct, frozen=True):
    """A fault: it strikes the `nth` time that the target begins `doing`, or at an instant after the start."""

    how: str
    """`kill`, `hang`, `exit`, `raise`; in a step only: `body`, an exception; `stall` of the training thread; `slow`, a
    long computation; `device`, an all-reduce of its groups never ends on the devices of any member.

    Of the target's whole node: `node`, it is gone at once; `freeze`, its agent stops, its workers live on for a while.

    Of the coordinator: `coordinator`, it is lost with the target's node, and another is elected; `defect`, it raises at
    the next fact before it handles the fact; `late defect`, it raises afterwards, so that its decision is not carried
    out. Of the shared disk: `disk`, no write ends for a long time.

    Of newcomers: `refuted`, none is equal to the rank that it would replace; `alone`, so too, and ranks have state
    that no other rank has. Of the memory of the target's node: `memory`, it has no room for copies.
    """
    rank: Rank | None = None
    """None: a standby."""
    doing: Doing | None = None
    nth: int = 1
    after: Seconds = 0.0
    """Delay from the start if `doing` is None, else from the begin of that activity."""
    lasts: Seconds = 200.0
    """Duration of a `slow` computation, or of the disk's fault."""
    back: Seconds | None = 2.0
    """Time from the detection of a lost node to its return; None: never."""


class SimRequest(msgspec.Struct, frozen=True):
    """A request to the job, or a new node, at an instant after the start."""

    what: str
    """`scale`; `drain` a node; `move` its ranks, or one of them; `node`: one more node joins.

    `stop`: the job must end within `grace`.

    `signals`: as `stop`, and every process gets the signal: a worker that has not reached its loop ends by it.
    """
    after: Seconds
    replicas: int = 1
    """Size that `scale` requests."""
    node: int = 0
    """Node that drains, or whose ranks move."""
    rank: Rank | None = None
    """Rank that moves alone."""
    grace: Seconds = 60.0
    """Time until a draining node is gone, even with workers on it, or until a stopped job must have ended."""
    slots: int = 1
    """Slots of a node that joins."""
    back: Seconds | None = 20.0
    """Time from a drained node's end to its return; None: never."""
    stay: Seconds | None = None
    """Announced duration of the new capacity; None: not announced."""


class FaultedWorld(Protocol):
    """The parts of the world that a fault changes."""

    workers: dict[WorkerId, SimWorker]
    bad_moments: set[str]
    disk: SimDisk
    copies: SimCopies

    defects: list[str]
    """Defects that the coordinator will still raise."""

    def lose(self, node: NodeId, fault: SimFault) -> None:
        """Lose a node's agent: it is gone or stopped."""
        ...

    def lose_coordinator(self, node: NodeId, fault: SimFault) -> None:
        """Lose the coordinator with the node that hosts it."""
        ...

    def reachable(self, worker: SimWorker) -> bool:
        """True if a worker's messages reach the coordinator."""
        ...


def fault_action(
    world: FaultedWorld, fault: SimFault, number: int, worker: SimWorker | None = None
) -> Callable[[], None]:
    """Action of a fault on a worker; None: on the worker that has the fault's rank at that time."""

    def act() -> None:
        target = worker or _target(world.workers, fault.rank)
        if target is None or not target.alive or (fault.how == "hang" and _nobody_else(world, target)):
            return
        world.bad_moments.add(f"{fault.how} {target.doing}")
        match fault.how:
            case "kill":
                target.end(-9)
            case "exit":
                target.end(3)
            case "hang":
                target.hang()
            case "slow" if target.doing in IN_STEP:
                target.slow_down(fault.lasts)
            case "slow":
                pass
            case "stall" if target.doing in IN_STEP:
                target.stall()
            case "stall":
                pass
            case "device" if target.doing is Doing.REDUCING and target.group is not None:
                target.group.stuck = True
            case "device":
                pass
            case "disk":
                world.bad_moments.add("disk")
                world.disk.sticks(fault.lasts)
            case "memory":
                world.copies.fill_up(target.spawn.node)
            case "refuted" | "alone":
                world.bad_moments.add("refuted")
                target.refute(alone=fault.how == "alone")
            case "defect" | "late defect":
                world.defects.append(fault.how)
            case "coordinator":
                world.lose_coordinator(target.spawn.node, fault)
            case "node" | "freeze":
                world.lose(target.spawn.node, fault)
            case "body" if target.doing not in (Doing.COMPUTING, Doing.REDUCING):
                pass
            case _:
                message = f"strike {number}"
                # Independent faults raise different errors, so that they do not count as one.
                target.raise_in_body(ErrorReport("RuntimeError", message, f"RuntimeError: {message}", message))

    return act


def _nobody_else(world: FaultedWorld, target: SimWorker) -> bool:
    """True if a hang could never be detected: there is no deadline while the whole job builds or cleans up.

    Workers that live on after the loss of their agent do not belong to the job any more.
    """
    if target.doing not in (Doing.BUILDING, Doing.READY, Doing.FINISHED, Doing.AFTER) or not target.placed:
        return False
    others = (w for w in world.workers.values() if w.alive and w.placed and not w.hung and w is not target)
    return not any(other.generation >= target.generation and world.reachable(other) for other in others)


def _target(workers: Mapping[WorkerId, SimWorker], rank: Rank | None) -> SimWorker | None:
    living = [worker for worker in workers.values() if worker.alive]
    return next((w for w in living if (w.rank if w.placed else None) == rank), None)
