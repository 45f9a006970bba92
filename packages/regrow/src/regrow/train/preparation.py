"""Work before the body of a step: the copies of the state that are due, and the batch."""

import time
from dataclasses import dataclass
from functools import partial
from typing import Any

from regrow.core.ids import Instant, Seconds, StepNo
from regrow.train.loop_context import LoopContext


@dataclass
class StepTimes:
    """Times of the newest step."""

    stall: Seconds = 0.0
    """Time for which training stood still for copies of the state."""
    data_wait: Seconds = 0.0
    """Time for which its batch was waited for."""
    begun_at: Instant = 0.0
    """When its body started."""


class Preparation:
    """Makes all ready for the body of a step.

    Args:
        standing: what the loop rests on.
    """

    def __init__(self, standing: LoopContext) -> None:
        self._standing, self.times = standing, StepTimes()

    def checkpoint(self) -> None:
        """At a step's boundary: take the copies of the state that are due; training stands still meanwhile."""
        since = time.monotonic()
        self._standing.member.waiting.checkpoint()
        self.times.stall = time.monotonic() - since

    def fetch(self, number: StepNo) -> Any:
        """The batch of a step. Raises what the loader raises."""
        member, batches, since = self._standing.member, self._standing.data(), time.monotonic()
        member.fetches(number)
        batch = batches.batch(number)
        self.times.data_wait = time.monotonic() - since
        member.body.reads = partial(batches.told, number)
        return batch

    def fetched(self, number: StepNo) -> None:
        """Show what was read for a step, to the agent and to those who compare the first reads."""
        self._standing.member.show_read(number, self._standing.data().record(number))
        if self._standing.first_reads is not None:
            self._standing.first_reads.fetched(number)

    def begins(self) -> None:
        """The body of the step starts now."""
        self.times.begun_at = time.monotonic()
