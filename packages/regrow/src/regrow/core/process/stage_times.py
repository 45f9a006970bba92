"""Stages on the way of a worker that joins a training, with the time of each. Pure."""

from collections.abc import Callable, Mapping

from regrow.core.ids import Instant, Seconds

START = "start"
"""From the order to start it to the first line of the script: the fork, or the wait for one."""
CONTEXT = "context"
"""Its accelerator is initialized, and a device chosen."""
BUILD = "build"
"""The script runs up to its loop, but for what the context and compiling take."""
COMPILE = "compile"
"""`torch.compile`, until the loop."""
REHEARSE = "rehearse"
"""The first run of the body, with local answers to collectives."""
CONNECT = "connect"
"""Groups are formed."""
HYDRATE = "hydrate"
"""State is received."""
FIRST_STEP = "first step"
"""From there to its first commit."""
STAGES = (START, CONTEXT, BUILD, COMPILE, REHEARSE, CONNECT, HYDRATE, FIRST_STEP)
"""In their order. `CONTEXT` and `COMPILE` come within those around them, and are not counted twice; a worker without
state of its own receives it while it connects."""


def longest(stages: Mapping[str, Seconds]) -> str:
    """The stage that took most; empty where there is none."""
    return max(stages, key=lambda stage: stages[stage], default="")


class StageClock:
    """Times of a worker's stages until its loop, measured where they happen.

    Args:
        since: when it was ordered, on this machine's monotonic clock; 0: not known, and then its start has no time.
    """

    def __init__(self, since: Instant = 0.0) -> None:
        self._since = since
        self._within: Seconds = 0.0
        self.seconds: dict[str, Seconds] = {}
        """By stage; a stage that did not happen is absent."""
        self.stop: Callable[[], None] = lambda: None
        """Ends what measures within a stage."""

    def reached(self, stage: str, now: Instant) -> None:
        """A stage ends; the first time that it does counts."""
        if stage in self.seconds:
            return
        if self._since:
            self.seconds[stage] = max(0.0, now - self._since - self._within)
        self._since, self._within = now, 0.0

    def within(self, stage: str, took: Seconds) -> None:
        """These seconds of the present stage went into another."""
        if took > 0:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + took
            self._within += took
