"""Jobs that are asked to stop, and scripts of newcomers that raise before their loop."""

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
    """The world as a stop changes it."""

    workers: dict[WorkerId, SimWorker]
    bad_moments: set[str]

    def after(self, delay: Seconds, action: Callable[[], None]) -> None:
        """Do it after a delay."""
        ...

    def jitter(self, around: Seconds) -> Seconds:
        """A time that is about as long as this one."""
        ...


def stop_job(world: StoppedWorld, coordinator: SimCoordinator, request: SimRequest) -> None:
    """Launchers tell it, to the next coordinator where there is none; with a signal who is not in its loop ends."""
    if not coordinator.there:
        world.after(_AGAIN_S, lambda: stop_job(world, coordinator, request))
        return
    world.bad_moments.add("stop")
    for worker in world.workers.values() if request.what == "signals" else ():
        if worker.doing in (Doing.BUILDING, Doing.IDLE):
            world.after(world.jitter(0.02), lambda worker=worker: worker.end(-15))  # type: ignore[misc]
    coordinator.report(facts.StopRequested("it is asked to", request.grace))


class FailingNewcomers:
    """Counts those that fail.

    Args:
        script: says how many do.
    """

    def __init__(self, script: SimScript) -> None:
        self._most = script.fails
        self._failed = 0

    def fails(self, worker: SimWorker) -> bool:
        """True if this worker's script raises before its loop."""
        fails = worker.spawn.role is not Role.RANK and (self._most < 0 or self._failed < self._most)
        self._failed += fails
        return fails
