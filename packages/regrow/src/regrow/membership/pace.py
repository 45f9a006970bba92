"""Pace of the steps, to predict the step that ranks will reach in a moment, for planned halts and snapshots. Pure."""

import math
from collections import deque
from statistics import median

from regrow.core.ids import Generation, Instant, Seconds, StepNo, WorkerId
from regrow.core.messages import facts

AHEAD_S: Seconds = 0.3
"""Lead of a planned step over the present one, so that the order arrives before the step begins."""
LEAST_AHEAD = 2
MOST_GUESSED = 8
"""Most steps to plan ahead while the time between two bodies is unknown. An order that arrives too late is repeated
for twice as many steps; but all ranks would wait for a step that a slow script reaches late."""
_LEAST_STEP_S: Seconds = 1e-4
_RECENT = 3
_LEAST_WAIT_S: Seconds = 2.0


class Pace:
    """The newest known step, its time of arrival, and the usual duration of a step with the work until the next one."""

    def __init__(self) -> None:
        self._generation = Generation(0)
        self._step = StepNo(0)
        self._received: Instant = 0.0
        self._last: dict[WorkerId, tuple[StepNo, Instant]] = {}
        """Newest step of each worker of the generation, and its commit time by the node's clock."""
        self._recent: deque[Seconds] = deque(maxlen=_RECENT)
        self._between: Seconds = 0.0
        """Time of a step outside its body. It is not known from a generation's first commit."""
        self._whole = False
        """True once `_between` is known."""

    @property
    def step_s(self) -> Seconds:
        """Usual time of a step."""
        return median(self._recent) if self._recent else 1.0

    def committed(self, event: facts.WorkerCommitted, now: Instant) -> None:
        """Note a worker's commit of a step. Facts of older generations must not be passed."""
        if event.generation != self._generation:
            self._generation, self._step = event.generation, StepNo(0)
            self._last.clear()
        last = self._last.get(event.worker)
        if last is None or event.step > last[0]:
            self._last[event.worker] = (event.step, event.at)
        if event.step < self._step:
            return
        self._step, self._received = StepNo(event.step + 1), now
        if last is not None and event.step > last[0]:
            self._whole = True
            self._between = max(0.0, (event.at - last[1]) / (event.step - last[0]) - event.seconds)
        self._recent.append(max(event.seconds + self._between, _LEAST_STEP_S))

    def ahead(self, now: Instant) -> int:
        """Estimated number of steps from the newest known one to the first that an order can still reach in time."""
        since = min(max(0.0, now - self._received), AHEAD_S * 10)
        ahead = math.floor(since / self.step_s) + max(LEAST_AHEAD, math.ceil(AHEAD_S / self.step_s))
        return ahead if self._whole else min(ahead, MOST_GUESSED)

    def until(self, steps: int) -> Seconds:
        """Expected duration of `steps` steps."""
        return steps * self.step_s

    def patience(self, steps: int) -> Seconds:
        """Longest wait for `steps` steps before something must have gone wrong."""
        return max(_LEAST_WAIT_S, 3 * self.until(steps)) + max(self._recent, default=self.step_s)
