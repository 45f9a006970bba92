"""When durable checkpoints are written, and what a resumed job starts from; `hydration.durable` writes them."""

import logging
import time
from pathlib import Path

from regrow.core.errors import CheckpointError
from regrow.core.ids import Seconds, StepNo
from regrow.hydration.durable import CheckpointWriter, latest, load
from regrow.train.protect import ProtectedState

_log = logging.getLogger("regrow")
LAST_WRITE_S: Seconds = 600.0


class DurableState:
    """Durable checkpoints of this worker's state.

    Args:
        directory: holds one folder a checkpoint.
        every: least time between two, in seconds.
    """

    def __init__(self, directory: Path, every: Seconds) -> None:
        self._directory, self._every = directory, every
        self._last = time.monotonic()
        self._writer = CheckpointWriter(directory, on_written=_written, on_error=_failed)

    def tick(self, state: ProtectedState, step: StepNo) -> None:
        """At a step's boundary: begin to write if it is time and the last one is done."""
        if time.monotonic() - self._last < self._every:
            return
        state.state_at = step
        if self._writer.begin(state, step):
            self._last = time.monotonic()

    def load(self, state: ProtectedState) -> StepNo:
        """Load the newest checkpoint; its step, or 0 where there is none. Raises `CheckpointError`, `StateError`."""
        found = latest(self._directory)
        return load(state, found[0]) if found is not None else StepNo(0)

    def finish(self, state: ProtectedState, step: StepNo) -> None:
        """The training is over: wait for the one being written, then write the final state."""
        self.close()
        state.state_at = step
        if self._last_written() != step:
            self._writer.begin(state, step)
            self.close()

    def _last_written(self) -> StepNo | None:
        found = latest(self._directory)
        return found[1] if found is not None else None

    def close(self) -> None:
        """Wait for a checkpoint that is being written."""
        self._writer.close(LAST_WRITE_S)


def _written(folder: Path, step: StepNo, seconds: Seconds) -> None:
    _log.info("state@%d written to %s in %.1f s", step, folder, seconds)


def _failed(error: CheckpointError) -> None:
    _log.error("%s", error)
