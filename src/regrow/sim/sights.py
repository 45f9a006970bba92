"""What simulated agents see of workers that stand still; they tell it as long as there is one."""

from collections.abc import Callable, Mapping

from regrow.core.ids import Instant, NodeId, Seconds, WorkerId
from regrow.core.messages.sights import NodeSeen, WorkerSight
from regrow.core.phase import Phase
from regrow.sim.script import IN_STEP, PHASES, Doing
from regrow.sim.workers import SimWorker

LOOK_S: Seconds = 10.0
_CALLS = {Doing.REDUCING: 1, Doing.VOTING: 2, Doing.UPDATING: 2}
_WATCHED = IN_STEP | {Doing.HALTING, Doing.FORMING, Doing.HYDRATING}


def watched(worker: SimWorker) -> bool:
    """Whether its standing still may mean something."""
    return worker.hung or worker.stalled or worker.doing in _WATCHED


def sight(worker: SimWorker, now: Instant) -> WorkerSight:
    """What its agent sees of it."""
    stuck = worker.hung or worker.stalled
    return WorkerSight(
        worker=worker.worker,
        generation=worker.generation,
        step=worker.state,
        calls=_CALLS.get(worker.doing, 0),
        phase=PHASES.get(worker.doing, Phase.COMPUTING),
        seconds=now - worker.since,
        waits=worker.doing in (Doing.REDUCING, Doing.VOTING) and not stuck,
        stopped=worker.hung,
        busy=now < worker.slow_until and not stuck,
    )


class Lookout:
    """The agents of all nodes, as far as they watch.

    Args:
        workers: all that there are.
        heard: whether the agent of a worker can reach the coordinator.
        now: the time.
        after: does something so much later.
        say: tells the coordinator.
    """

    def __init__(
        self,
        workers: Mapping[WorkerId, SimWorker],
        *,
        heard: Callable[[SimWorker], bool],
        now: Callable[[], Instant],
        after: Callable[[Seconds, Callable[[], None]], None],
        say: Callable[[NodeId, NodeSeen], None],
    ) -> None:
        self._workers, self._heard = workers, heard
        self._now, self._after, self._say = now, after, say
        self._watching = False

    def watch(self) -> None:
        """Look in a moment, and as long as somebody stands still."""
        if not self._watching:
            self._watching = True
            self._after(LOOK_S, self._look)

    def _look(self) -> None:
        """All agents tell what they see."""
        now, self._watching = self._now(), False
        seen: dict[NodeId, list[WorkerSight]] = {}
        for worker in self._workers.values():
            if worker.alive and self._heard(worker):
                seen.setdefault(worker.spawn.node, []).append(sight(worker, now))
        if any(each.seconds >= LOOK_S for sights in seen.values() for each in sights):
            for node, sights in seen.items():
                self._say(node, NodeSeen(node, sights, 0.5))
        if any(worker.alive and watched(worker) for worker in self._workers.values()):
            self.watch()
