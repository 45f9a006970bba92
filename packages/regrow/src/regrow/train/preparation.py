"""Work before the body of a step, with its times: copies of the state that are due, and fetching the batch."""

import time
from functools import partial
from typing import Any

from regrow.core.ids import StepNo
from regrow.train.loop_context import LoopContext


class Preparation:
    """Prepares the body of a step.

    Args:
        context: context of the loop.
    """

    def __init__(self, context: LoopContext) -> None:
        self._context = context
        self.begun_at = self.stall = self.data_wait = 0.0
        """Monotonic time at which the newest body started; seconds spent before it on copies, and on the batch."""

    def checkpoint(self) -> None:
        """At a step's boundary, take the copies of the state that are due; training waits meanwhile."""
        since = time.monotonic()
        self._context.worker.waiting.checkpoint()
        self.stall = time.monotonic() - since

    def fetch(self, number: StepNo) -> Any:
        """The batch of a step. Raises what the loader raises."""
        worker, batches, since = self._context.worker, self._context.data(), time.monotonic()
        worker.fetches(number)
        batch = batches.batch(number)
        self.data_wait = time.monotonic() - since
        worker.body.reads = partial(batches.describe, number)
        return batch

    def fetched(self, number: StepNo) -> None:
        """Report the data read for a step to the agent, and to the comparison of first reads."""
        self._context.worker.show_read(number, self._context.data().record(number))
        if self._context.first_reads is not None:
            self._context.first_reads.fetched(number)
