"""Stages of a worker that joins a training, and the time of each. Pure.

`start`: from its order to the first line of its script; `context`: its accelerator is chosen and initialized; `build`:
the script runs up to its loop; `compile`: `torch.compile`, until the loop; `rehearse`: the first run of the body;
`connect`: groups are formed; `hydrate`: a newcomer receives state while it connects; `first step`: from there to its
first commit. Context and compile happen within the stages around them, and are not counted twice.
"""

from collections.abc import Callable

from regrow.core.ids import Instant, Seconds

STAGES = ("start", "context", "build", "compile", "rehearse", "connect", "hydrate", "first step")
START, CONTEXT, BUILD, COMPILE, REHEARSE, CONNECT, HYDRATE, FIRST_STEP = STAGES


class StageClock:
    """Times of a worker's stages until its loop, measured in the worker.

    Args:
        since: time of its order, on this machine's monotonic clock; 0: not known, so that `start` has no time.
    """

    def __init__(self, since: Instant = 0.0) -> None:
        self._since, self._within = since, 0.0
        self.seconds: dict[str, Seconds] = {}
        """By stage; a stage that did not happen is absent."""
        self.stop: Callable[[], None] = lambda: None
        """Ends a measurement within a stage."""

    def reached(self, stage: str, now: Instant, compiled: Seconds = 0.0) -> None:
        """End a stage; only its first end counts. `compiled`: the process's time of compiling so far."""
        self.within(COMPILE, compiled - self.seconds.get(COMPILE, 0.0))
        if self._since and stage not in self.seconds:
            self.seconds[stage] = max(0.0, now - self._since - self._within)
        self._since, self._within = now, 0.0

    def within(self, stage: str, took: Seconds) -> None:
        """Count these seconds of the present stage for another stage."""
        if took > 0:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + took
            self._within += took
