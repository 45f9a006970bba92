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
    """Something goes wrong: the `nth` time that the target does `doing`, or at an instant after the start."""

    how: str
    """`kill`, `hang`, `exit`, `raise`; or in a step only: `body`, an exception, `stall`, of the training thread, and
    `slow`: it computes for long, `device`, a sum of its groups never ends on the devices, for all in it.

    To the target's whole node: `node`, it is gone at once; `freeze`, its agent stops, its workers live on for a while.

    To the coordinator: `coordinator`, it is lost with the target's node, and another is elected; `defect`, it raises at
    the next fact before it has done anything about it, and `late defect`, when it has, so that what it has decided is
    not carried out. To the disk that all nodes see: `disk`, nothing that is written there comes to its end for long.

    To what is known of newcomers: `refuted`, none is equal to the rank that it would replace, `alone`, and ranks have
    state that no other has. To the memory of the target's node: `memory`, it has no room for copies.
    """
    rank: Rank | None = None
    """None: a standby."""
    doing: Doing | None = None
    nth: int = 1
    after: Seconds = 0.0
    """From the start where `doing` is None, else from the moment at which it was entered."""
    lasts: Seconds = 200.0
    """For how long a `slow` one computes, or the disk is stuck."""
    back: Seconds | None = 2.0
    """Return of a lost node, from the moment at which it is known to be lost; None: never."""


class SimRequest(msgspec.Struct, frozen=True):
    """Somebody asks for something, or gives it, at an instant after the start."""

    what: str
    """`scale`; `drain`, of a node; `move`, of its ranks, or of one alone; `node`: one more comes.

    `stop`: the job is to end, within `grace`.

    `signals`: so too, and every process of it gets the signal: who is not in its loop yet ends by it.
    """
    after: Seconds
    replicas: int = 1
    """Size that `scale` asks for."""
    node: int = 0
    """Node that drains, or whose ranks move."""
    rank: Rank | None = None
    """Rank that moves alone."""
    grace: Seconds = 60.0
    """After which a draining node is gone, whoever is on it, or a job that is to stop has ended."""
    slots: int = 1
    """Of a node that comes."""
    back: Seconds | None = 20.0
    """Time after its end at which a drained node comes again; None: never."""
    stay: Seconds | None = None
    """For how long the capacity is announced."""


class FaultedWorld(Protocol):
    """The world as a strike changes it."""

    workers: dict[WorkerId, SimWorker]
    bad_moments: set[str]
    disk: SimDisk
    copies: SimCopies

    defects: list[str]
    """Those that the coordinator will come to."""

    def lose(self, node: NodeId, fault: SimFault) -> None:
        """An agent is gone or stopped."""
        ...

    def lose_coordinator(self, node: NodeId, fault: SimFault) -> None:
        """The coordinator is lost, with a node that hosts it."""
        ...

    def reachable(self, worker: SimWorker) -> bool:
        """True if a worker's messages reach the coordinator."""
        ...


def fault_action(
    world: FaultedWorld, fault: SimFault, number: int, worker: SimWorker | None = None
) -> Callable[[], None]:
    """Action of a strike on a worker; without one on the worker that has its rank then."""

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
                # Errors of independent causes: each at a place of its own.
                target.raise_in_body(ErrorReport("RuntimeError", message, f"RuntimeError: {message}", message))

    return act


def _nobody_else(world: FaultedWorld, target: SimWorker) -> bool:
    """True if a hang would never be seen: no bound is known for a whole job that builds, or tidies up.

    Workers that live on without their agent, which is lost, are not of the job any more.
    """
    if target.doing not in (Doing.BUILDING, Doing.READY, Doing.FINISHED, Doing.AFTER) or not target.placed:
        return False
    others = (w for w in world.workers.values() if w.alive and w.placed and not w.hung and w is not target)
    return not any(other.generation >= target.generation and world.reachable(other) for other in others)


def _target(workers: Mapping[WorkerId, SimWorker], rank: Rank | None) -> SimWorker | None:
    living = [worker for worker in workers.values() if worker.alive]
    return next((w for w in living if (w.rank if w.placed else None) == rank), None)
