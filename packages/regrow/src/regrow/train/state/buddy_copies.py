"""Schedules copies of a worker's state outside its process, and waits until they are stored."""

import logging
import time
from collections.abc import Callable

from regrow.agent.workers.link import WorkerLink
from regrow.core.errors import DeadlineExceeded, UsageError
from regrow.core.ids import Seconds, StepNo
from regrow.core.messages.copies import SnapshotStored, StateKept
from regrow.hydration.copies.snapshot import SnapshotKeeper
from regrow.train.state.protected import ProtectedState

STORE_S: Seconds = 120.0
_log = logging.getLogger("regrow")


class BuddyCopies:
    """Copies of this worker's state in its agent's memory, and from there in that of another node's agent.

    Args:
        link: the channel to the agent.
        every: steps between two copies; 0 if there are none.
        halted: returns True if the generation is over.
    """

    def __init__(self, link: WorkerLink, *, every: int, halted: Callable[[], bool]) -> None:
        self._link, self._every, self._halted = link, every, halted
        self._keeper = SnapshotKeeper(link.env.worker, send=link.send, warn=_log.warning)

    def stored(self, answer: SnapshotStored) -> None:
        """Note the agent's answer to a copy. Called by the control thread."""
        self._keeper.stored(answer.step, answer.error)

    def wake(self) -> None:
        """End the wait for a copy, as the generation is over. May be called from any thread."""
        self._keeper.wake()

    def tick(self, state: ProtectedState, step: StepNo) -> None:
        """At a step's boundary, take the copy that is due."""
        if self._every > 0 and step % self._every == 0 and self._keeper.newest != step:
            state.state_at = step
            try:
                self._keeper.take(state, step, self._link.env.rank, state.layout())
            except UsageError as error:  # a step has added an object whose state cannot be read
                self._every = 0
                _log.warning("rank %d has no more copies of its state: %s", self._link.env.rank, error.cause)

    def keep(self, state: ProtectedState, step: StepNo) -> None:
        """Copy the state to the agent's memory, as this worker will be ended and its state is still needed."""
        state.state_at = step
        worker, rank = self._link.env.worker, self._link.env.rank
        if self._keeper.take(state, step, rank, state.layout(), asked=True) is None:
            self._link.send(StateKept(worker, step, f"rank {rank} has no memory for a copy of its state"))

    def await_stored(self) -> None:
        """Wait until the newest copy is stored, before the state changes.

        So at most `every` steps can be lost. If the wait takes too long, training goes on without the copy.
        """
        try:
            self._keeper.wait_stored(time.monotonic() + STORE_S, halted=self._halted)
        except DeadlineExceeded as error:
            _log.warning("%s; going on", error)

    def rewind(self, step: StepNo) -> None:
        """Note that the world continues from `state@step`."""
        self._keeper.rewind(step)
