"""Simulated agents' observations of workers without progress, sent as long as there is such a worker."""

from collections.abc import Callable, Mapping

from regrow.core.ids import Instant, NodeId, Seconds, WorkerId
from regrow.core.messages.observations import DEVICE, NodeSeen, WorkerObservation
from regrow.core.phase import Phase
from regrow_lab.sim.network import Alarm
from regrow_lab.sim.script import IN_STEP, PHASES, Doing
from regrow_lab.sim.workers import SimWorker

LOOK_S: Seconds = 10.0
STILL_S: Seconds = 3600.0
SELDOM_S: Seconds = 600.0
"""Interval of observations once all watched workers have made no progress for `STILL_S`."""
_CALLS = {Doing.REDUCING: 1, Doing.VOTING: 2, Doing.UPDATING: 2}
_WATCHED = IN_STEP | {Doing.HALTING, Doing.FORMING, Doing.HYDRATING}


def watched(worker: SimWorker) -> bool:
    """True if the lack of progress of this worker is relevant."""
    return worker.hung or worker.stalled or worker.doing in _WATCHED


def observe(worker: SimWorker, now: Instant) -> WorkerObservation:
    """The agent's observation of a worker."""
    stuck = worker.hung or worker.stalled
    return WorkerObservation(
        worker=worker.worker,
        generation=worker.generation,
        step=worker.state,
        calls=_CALLS.get(worker.doing, 0),
        phase=PHASES.get(worker.doing, Phase.COMPUTING),
        seconds=now - worker.since,
        waits=worker.doing in (Doing.REDUCING, Doing.VOTING) and not stuck,
        awaits=DEVICE if worker.group is not None and worker.group.stuck and not stuck else "",
        stopped=worker.hung,
        busy=now < worker.slow_until and not stuck,
    )


class Lookout:
    """Watches workers without progress, for the agents of all nodes.

    Args:
        workers: all workers.
        reachable: true if a worker's agent can reach the coordinator.
        now: the time.
        at: schedules an action.
        say: sends to the coordinator.
    """

    def __init__(
        self,
        workers: Mapping[WorkerId, SimWorker],
        *,
        reachable: Callable[[SimWorker], bool],
        now: Callable[[], Instant],
        at: Callable[[Instant, Callable[[], None]], None],
        say: Callable[[NodeId, NodeSeen], None],
    ) -> None:
        self._workers, self._received = workers, reachable
        self._now, self._say = now, say
        self._next = Alarm(at, self._look)

    def watch(self) -> None:
        """Observe soon, and then as long as there is a watched worker."""
        self._next.set(self._now() + LOOK_S)

    def _look(self) -> None:
        """Send the observations of all agents."""
        now = self._now()
        seen: dict[NodeId, list[WorkerObservation]] = {}
        for worker in self._workers.values():
            if worker.alive and self._received(worker):
                seen.setdefault(worker.spawn.node, []).append(observe(worker, now))
        if any(each.seconds >= LOOK_S for observations in seen.values() for each in observations):
            for node, observations in seen.items():
                self._say(node, NodeSeen(node, observations, 0.5))
        still = [now - worker.since for worker in self._workers.values() if worker.alive and watched(worker)]
        if still:
            self._next.set(now + (SELDOM_S if min(still) >= STILL_S else LOOK_S))
