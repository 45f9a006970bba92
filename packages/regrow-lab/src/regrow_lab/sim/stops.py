"""Requests to stop a job, and newcomers whose scripts raise before their loop."""

from collections.abc import Callable
from typing import Protocol

from regrow.core.ids import Seconds, WorkerId
from regrow.core.messages import facts
from regrow.core.messages.vocabulary import Role
from regrow_lab.sim.coordinator import SimCoordinator
from regrow_lab.sim.faults import SimRequest
from regrow_lab.sim.script import Doing, SimScript
from regrow_lab.sim.workers import SimWorker

_AGAIN_S: Seconds = 0.5


class StoppedWorld(Protocol):
    """The parts of the world that a stop changes."""

    workers: dict[WorkerId, SimWorker]
    bad_moments: set[str]

    def after(self, delay: Seconds, action: Callable[[], None]) -> None:
        """Schedule an action after a delay."""
        ...

    def jitter(self, around: Seconds) -> Seconds:
        """A random time of about this length."""
        ...


def stop_job(world: StoppedWorld, coordinator: SimCoordinator, request: SimRequest) -> None:
    """Send the request, to the next coordinator if there is none; a signal ends workers before their loop."""
    if not coordinator.there:
        world.after(_AGAIN_S, lambda: stop_job(world, coordinator, request))
        return
    world.bad_moments.add("stop")
    for worker in world.workers.values() if request.what == "signals" else ():
        if worker.doing in (Doing.BUILDING, Doing.IDLE):
            world.after(world.jitter(0.02), lambda worker=worker: worker.end(-15))  # type: ignore[misc]
    coordinator.report(facts.StopRequested("it is asked to", request.grace))


class FailingNewcomers:
    """Counts failing newcomers.

    Args:
        script: gives their number.
    """

    def __init__(self, script: SimScript) -> None:
        self._most = script.fails
        self._failed = 0

    def fails(self, worker: SimWorker) -> bool:
        """True if this worker's script raises before its loop."""
        fails = worker.spawn.role is not Role.RANK and (self._most < 0 or self._failed < self._most)
        self._failed += fails
        return fails
