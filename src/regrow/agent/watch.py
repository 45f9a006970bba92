"""Which worker hangs. A worker that waits for others in a collective stands still too: the culprit is who is behind."""

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from regrow.core.board import Phase, Reading
from regrow.core.ids import Generation, Instant, Seconds, StepNo, WorkerId
from regrow.core.messages import WorkerHung

_IN_STEP = (Phase.DATA, Phase.COMPUTING, Phase.UPDATING)
_FLOOR_S: Seconds = 30.0
_FACTOR = 10.0
_RECENT_STEPS = 50


class Sight(NamedTuple):
    """A worker's board and since when it shows the same. `stopped`: the kernel says the process is stopped."""

    worker: WorkerId
    reading: Reading
    since: Instant
    stopped: bool = False

    @property
    def progress(self) -> tuple[int, int, int]:
        """Grows as the worker goes on."""
        return self.reading.generation, self.reading.step, self.reading.calls

    @property
    def in_step(self) -> bool:
        """Whether the time that it takes is bounded by the time a step takes."""
        return self.reading.phase in _IN_STEP


def decide(sights: Iterable[Sight], *, bound: Seconds, now: Instant) -> list[Sight]:
    """The workers that hang, as far as one node can see.

    A stopped process hangs once it stood still for longer than `bound`, in a step or while it receives state.
    Otherwise those with the least progress do, if they themselves stood still for that long: a worker that is behind
    but moves, or that is between two steps (where a script may evaluate for as long as it likes), is what the others
    rightly wait for.
    """
    sights = list(sights)
    members = [sight for sight in sights if sight.in_step or sight.reading.phase is Phase.OUTSIDE]
    still = [sight for sight in sights if now - sight.since > bound]
    if stopped := [each for each in still if each.stopped and (each.in_step or each.reading.phase is Phase.RECOVERING)]:
        return stopped
    stalled = [sight for sight in still if sight.in_step]
    if not stalled:
        return []
    least = min(sight.progress for sight in members)
    behind = [sight for sight in members if sight.progress == least]
    return behind if all(sight in stalled for sight in behind) else []


class Watcher:
    """Remembers what the boards showed, and the recent step times.

    Args:
        timeout: a fixed bound; None for one that follows the step times.
    """

    def __init__(self, timeout: Seconds | None) -> None:
        self._timeout = timeout
        self._steps: deque[Seconds] = deque(maxlen=_RECENT_STEPS)
        self._seen: dict[WorkerId, tuple[int, Instant]] = {}
        self._told: dict[WorkerId, tuple[int, Instant]] = {}

    @property
    def bound(self) -> Seconds:
        """How long a worker may stand still within a step."""
        if self._timeout is not None:
            return self._timeout
        return max(_FLOOR_S, _FACTOR * max(self._steps, default=0.0))

    def step_took(self, seconds: Seconds) -> None:
        """A step was committed."""
        self._steps.append(seconds)

    def look(self, readings: dict[WorkerId, Reading], now: Instant) -> list[Sight]:
        """Readings with the time since when each shows the same; workers not among them are forgotten."""
        self._seen = {worker: seen for worker, seen in self._seen.items() if worker in readings}
        self._told = {worker: told for worker, told in self._told.items() if worker in readings}
        sights = []
        for worker, reading in readings.items():
            beats, since = self._seen.get(worker, (-1, now))
            if beats != reading.beats:
                since = now
            self._seen[worker] = (reading.beats, since)
            sights.append(Sight(worker, reading, since))
        return sights

    def news(self, sights: list[Sight], now: Instant) -> list[WorkerHung]:
        """What to report: each standstill, and again after every further `bound` that it lasts.

        What the coordinator makes of it depends on what it knows at that moment, so once may be too early.
        """
        found = []
        for sight in decide(sights, bound=self.bound, now=now):
            beats, at = self._told.get(sight.worker, (-1, now))
            if beats == sight.reading.beats and now - at < self.bound:
                continue
            self._told[sight.worker] = (sight.reading.beats, now)
            found.append(self._describe(sight, now))
        return found

    def _describe(self, sight: Sight, now: Instant) -> WorkerHung:
        reading = sight.reading
        seconds = now - sight.since
        state = "the process is stopped (state T)" if sight.stopped else "the process runs"
        return WorkerHung(
            worker=sight.worker,
            generation=Generation(reading.generation),
            step=StepNo(reading.step),
            seconds=seconds,
            bound=self.bound,
            stopped=sight.stopped,
            detail=(
                f"no progress for {seconds:.1f} s (bound {self.bound:.1f} s) in {reading.phase.name.lower()} of step "
                f"{reading.step}, after {reading.calls} collectives; {state}"
            ),
        )
