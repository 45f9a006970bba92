"""When durable checkpoints are written, and what a resumed job starts from. How they are written: `hydration.durable`."""

import logging
import time
from pathlib import Path

from regrow.core.errors import CheckpointError
from regrow.core.ids import Seconds, StepNo
from regrow.train.protect import ProtectedState

_log = logging.getLogger("regrow")


class DurableState:
    """Durable checkpoints of this worker's state.

    Args:
        directory: holds one folder a checkpoint.
        every: least time between two, in seconds.
    """

    def __init__(self, directory: Path, every: Seconds) -> None:
        self._directory, self._every = directory, every
        self._last = time.monotonic()

    def tick(self, state: ProtectedState, step: StepNo) -> None:
        """At a step's boundary."""

    def load(self, state: ProtectedState) -> StepNo:
        """Load the newest checkpoint; its step, or 0 where there is none. Raises `CheckpointError`."""
        raise CheckpointError("not yet")

    def close(self) -> None:
        """Wait for a checkpoint that is being written."""
