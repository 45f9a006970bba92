"""How fast steps are made, to say where they will be in a moment. Pure."""

import math

from regrow.core.ids import Generation, Instant, Seconds, StepNo

AHEAD_S: Seconds = 0.3
"""How far ahead of the present step a planned halt is, so that its order is there before the step is."""
LEAST_AHEAD = 2
_LEAST_STEP_S: Seconds = 1e-4


class Pace:
    """The newest step that is known of, when that was, and how long a step takes."""

    def __init__(self) -> None:
        self.step_s: Seconds = 1.0
        self._generation = Generation(0)
        self._step = StepNo(0)
        self._heard: Instant = 0.0

    def committed(self, generation: Generation, step: StepNo, seconds: Seconds, now: Instant) -> None:
        """A step that took so many seconds was committed."""
        if generation != self._generation or step >= self._step:
            self._generation, self._step, self._heard = generation, StepNo(step + 1), now
            self.step_s = max(seconds, _LEAST_STEP_S)

    def ahead(self, now: Instant) -> int:
        """How many steps after the newest known one an order can be in time, as far as one can know."""
        since = min(max(0.0, now - self._heard), AHEAD_S * 10)
        return math.floor(since / self.step_s) + max(LEAST_AHEAD, math.ceil(AHEAD_S / self.step_s))

    def until(self, steps: int) -> Seconds:
        """How long so many steps take."""
        return steps * self.step_s
