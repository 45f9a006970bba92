"""Stages of a worker that joins a training, and the time of each. Pure.

`start`: from the order for it to the first line of its script; `context`: its accelerator is chosen and initialized;
`build`: the script runs up to its loop; `compile`: `torch.compile`, until the loop; `rehearse`: the first run of the
body; `connect`: groups are formed; `hydrate`: a newcomer receives state while it connects; `first step`: from there to
its first commit. Context and compile happen within the stages around them, and are not counted twice.
"""

from collections.abc import Callable

from regrow.core.ids import Instant, Seconds

STAGES = ("start", "context", "build", "compile", "rehearse", "connect", "hydrate", "first step")
START, CONTEXT, BUILD, COMPILE, REHEARSE, CONNECT, HYDRATE, FIRST_STEP = STAGES


class StageClock:
    """Times of a worker's stages up to its loop, measured in the worker.

    Args:
        since: time of the order for the worker, on this machine's monotonic clock; 0: unknown, so `start` has no time.
    """

    def __init__(self, since: Instant = 0.0) -> None:
        self._since, self._within = since, 0.0
        self.seconds: dict[str, Seconds] = {}
        """Duration by stage; a stage that did not happen is absent."""
        self.stop: Callable[[], None] = lambda: None
        """Ends the measurement of a stage within a stage, if one is running."""

    def reached(self, stage: str, now: Instant, compiled: Seconds = 0.0) -> None:
        """End a stage; only the first call for a stage counts. `compiled`: the process's time of compiling so far."""
        self.within(COMPILE, compiled - self.seconds.get(COMPILE, 0.0))
        if self._since and stage not in self.seconds:
            self.seconds[stage] = max(0.0, now - self._since - self._within)
        self._since, self._within = now, 0.0

    def within(self, stage: str, took: Seconds) -> None:
        """Count these seconds for `stage`, and not for the stage around it."""
        if took > 0:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + took
            self._within += took
