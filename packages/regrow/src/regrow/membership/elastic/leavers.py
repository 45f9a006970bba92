"""Workers that were released while the job goes on. Nothing waits for them, so they may take their time. Pure.

Leavers have lower priority than training workers, so their last work can take long on busy cores. A leaver is ended
once it has been idle for the deadline, or has used that much processor time; otherwise it may go on.
"""

from collections.abc import Iterator

from regrow.core.ids import Instant, Seconds, WorkerId
from regrow.core.messages.observations import NodeSeen, WorkerObservation
from regrow.membership.roster import Roster, Stage, WorkerRecord

_TOUCH_S: Seconds = 0.05
"""Processor time between two observations below which a worker is idle."""


class Leavers:
    """Limits on how long workers may stay after they were released.

    Args:
        roster: the job's workers.
        deadline: longest idle time, and most processor time.
    """

    def __init__(self, roster: Roster, deadline: Seconds) -> None:
        self._roster, self._deadline = roster, deadline
        self._first: dict[WorkerId, Seconds] = {}
        """Processor time of each leaver at its first observation."""
        self._last: dict[WorkerId, tuple[Seconds, Instant]] = {}
        """Processor time of each leaver so far, and the time at which it was last busy."""
        self._not_before: Instant = 0.0

    def seen(self, event: NodeSeen, now: Instant) -> None:
        """Note the processor times of leavers from an agent's observations."""
        if self.oldest is None:
            self._first.clear()
            self._last.clear()
            return
        for observation in event.observations:
            worker = self._roster.workers.get(observation.worker)
            if worker is not None and _leaves(worker):
                self._note(observation, now)

    def _note(self, observation: WorkerObservation, now: Instant) -> None:
        first = self._first.setdefault(observation.worker, observation.used)
        used, busy_at = self._last.get(observation.worker, (observation.used, -1.0))
        if observation.busy or observation.used - used >= _TOUCH_S:
            busy_at = now
        self._last[observation.worker] = max(used, observation.used) if busy_at == now else used, busy_at
        if observation.used - first >= self._deadline:
            self._not_before = 0.0

    def late(self, now: Instant) -> Iterator[WorkerRecord]:
        """The leavers that have exceeded their limit and must be ended now."""
        at = self.next_deadline()
        if at is None or now < at:
            return
        there = [each for each in self._roster.workers.values() if _leaves(each)]
        until = {each.worker: self._until(each) for each in there}
        self._not_before = min((at for at in until.values() if at > now), default=0.0)
        yield from (each for each in there if until[each.worker] <= now)

    def _until(self, worker: WorkerRecord) -> Instant:
        used, busy_at = self._last.get(worker.worker, (0.0, -1.0))
        if used - self._first.get(worker.worker, used) >= self._deadline:
            return worker.since + self._deadline
        return max(worker.since, busy_at) + self._deadline

    def next_deadline(self) -> Instant | None:
        """Latest time at which `late` must be called; None: there are no leavers."""
        oldest = self.oldest
        return None if oldest is None else max(oldest.since + self._deadline, self._not_before)

    @property
    def oldest(self) -> WorkerRecord | None:
        """The worker that has been leaving for longest; None: no worker is."""
        found = None
        for oldest in (self._roster.oldest(Stage.RELEASED), self._roster.oldest(Stage.RELEASED, placed=False)):
            if oldest is not None and oldest.leaver and (found is None or oldest.since < found.since):
                found = oldest
        return found


def _leaves(worker: WorkerRecord) -> bool:
    return worker.leaver and worker.stage is Stage.RELEASED
