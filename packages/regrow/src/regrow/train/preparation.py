"""Work before the body of a step: the copies of the state that are due, and the batch; with their times."""

import time
from functools import partial
from typing import Any

from regrow.core.ids import StepNo
from regrow.train.loop_context import LoopContext


class Preparation:
    """Makes all ready for the body of a step.

    Args:
        standing: what the loop rests on.
    """

    def __init__(self, standing: LoopContext) -> None:
        self._standing = standing
        self.begun_at = self.stall = self.data_wait = 0.0
        """When the newest body started; seconds for which copies, and the batch, were waited for before it."""

    def checkpoint(self) -> None:
        """At a step's boundary: take the copies of the state that are due; training stands still meanwhile."""
        since = time.monotonic()
        self._standing.member.waiting.checkpoint()
        self.stall = time.monotonic() - since

    def fetch(self, number: StepNo) -> Any:
        """The batch of a step. Raises what the loader raises."""
        member, batches, since = self._standing.member, self._standing.data(), time.monotonic()
        member.fetches(number)
        batch = batches.batch(number)
        self.data_wait = time.monotonic() - since
        member.body.reads = partial(batches.describe, number)
        return batch

    def fetched(self, number: StepNo) -> None:
        """Show what was read for a step, to the agent and to those who compare the first reads."""
        self._standing.member.show_read(number, self._standing.data().record(number))
        if self._standing.first_reads is not None:
            self._standing.first_reads.fetched(number)
