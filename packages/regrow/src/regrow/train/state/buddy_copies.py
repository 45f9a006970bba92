"""Schedule of the copies of a worker's state outside itself, and of the waits until they are safe."""

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
    """Copies of this worker's state in its agent's memory, and from there in that of another node's.

    Args:
        link: to the agent.
        every: steps between two copies; 0: there are none.
        halted: whether the generation is over.
    """

    def __init__(self, link: WorkerLink, *, every: int, halted: Callable[[], bool]) -> None:
        self._link, self._every, self._halted = link, every, halted
        self._keeper = SnapshotKeeper(link.env.worker, send=link.send, warn=_log.warning)

    def stored(self, answer: SnapshotStored) -> None:
        """The agent has a copy; from the control thread."""
        self._keeper.stored(answer.step, answer.error)

    def wake(self) -> None:
        """The generation is over: nobody waits for a copy any more. From any thread."""
        self._keeper.wake()

    def tick(self, state: ProtectedState, step: StepNo) -> None:
        """At a step's boundary: take the copy that is due."""
        if self._every > 0 and step % self._every == 0 and self._keeper.newest != step:
            state.state_at = step
            try:
                self._keeper.take(state, step, self._link.env.rank, state.layout())
            except UsageError as error:  # a step has put something there that cannot be told
                self._every = 0
                _log.warning("rank %d has no more copies of its state: %s", self._link.env.rank, error.cause)

    def keep(self, state: ProtectedState, step: StepNo) -> None:
        """This worker is to be ended, and its state is to stay: leave it in the agent's memory."""
        state.state_at = step
        worker, rank = self._link.env.worker, self._link.env.rank
        if self._keeper.take(state, step, rank, state.layout(), asked=True) is None:
            self._link.send(StateKept(worker, step, f"rank {rank} has no memory for a copy of its state"))

    def settle(self) -> None:
        """Before the state goes on: wait until the newest copy is where it belongs.

        So at most `every` steps of it can be lost. Training goes on without where that takes too long.
        """
        try:
            self._keeper.wait_stored(time.monotonic() + STORE_S, halted=self._halted)
        except DeadlineExceeded as error:
            _log.warning("%s; going on", error)

    def rewind(self, step: StepNo) -> None:
        """The world goes on from `state@step`."""
        self._keeper.rewind(step)
