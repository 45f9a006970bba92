"""Handles a worker's waits for the others: for the next membership, or for the end of the job."""

import contextlib
from collections.abc import Callable

from regrow.agent.workers.link import WorkerLink
from regrow.agent.workers.tracebacks import report
from regrow.core.errors import GenerationHalted, RegrowError
from regrow.core.ids import Generation, Rank, Seconds, StepNo
from regrow.core.messages import facts
from regrow.core.messages.copies import StateKept
from regrow.core.messages.trainings import FinishedTraining
from regrow.core.messages.vocabulary import FaultKind, WorldChange
from regrow.core.phase import Phase
from regrow.core.process.priority import end_soon
from regrow.step.machine import Adopted
from regrow.train.state.buddy_copies import BuddyCopies
from regrow.train.state.durable import DurableState
from regrow.train.state.protected import ProtectedState
from regrow.train.worker.control import Control
from regrow.train.worker.failed_device import leave_if_device_failed
from regrow.train.worker.recovery import Recovery

_END_S: Seconds = 1.0
"""Processor time that a released worker may still use: a script's clean-up and Python's own exit need less."""


class WorkerReleased(SystemExit):
    """Raised when this worker leaves the job, which goes on without it: its process ends with code 0."""

    def __init__(self, change: WorldChange | None) -> None:
        super().__init__(0)
        self.change = change


def report_fault(link: WorkerLink, generation: Generation, step: StepNo, kind: FaultKind, error: Exception) -> None:
    """Report an error of this worker to the coordinator, which decides what follows.

    If this worker's accelerator has failed for good, the process ends instead, which reports that.
    """
    leave_if_device_failed(link, error)
    link.send(facts.WorkerFaulted(link.env.worker, generation, step, kind, report(error)))


class Rejoin:
    """Handles a worker's time between two generations: it waits for orders, and carries them out.

    Args:
        link: the channel to the agent.
        control: receives the orders.
        recovery: brings this worker into a new generation.
        state: the protected state.
        copies: copies of the state in the agent's memory.
        durable: takes snapshots of the state for the disk; None if there are none.
    """

    def __init__(
        self,
        link: WorkerLink,
        control: Control,
        recovery: Recovery,
        state: ProtectedState,
        copies: BuddyCopies,
        durable: DurableState | None,
    ) -> None:
        self._link, self._control, self._recovery, self._state = link, control, recovery, state
        self._copies, self._durable = copies, durable
        self._changed_in = Generation(0)
        self._change: WorldChange | None = None

    def rejoin(self, give_up: Callable[[], None]) -> StepNo | None:
        """Wait for a membership and join it; returns the step that its peers committed for this worker, if any.

        Args:
            give_up: called when no rank uses the old groups any more.

        Raises `WorkerReleased` if the next membership does not include this worker.
        """
        if self._recovery.groups.halted:  # before a planned change others may still be in the last step
            give_up()
        while True:
            form = self._control.await_form()
            if form is None:
                if self._control.released is not None:
                    give_up()
                    self._link.board.enter(Phase.OUTSIDE)
                    end_soon(_END_S)  # the remaining workers go on training, perhaps on the same cores
                    raise WorkerReleased(self._control.released.change)
                self.snapshot()
                self._keep()
                continue
            if not self._recovery.groups.serves(form.generation):
                give_up()
            try:
                outcome = self._recovery.join(form)
            except GenerationHalted:
                continue
            except Exception as error:  # noqa: BLE001  the coordinator must be informed of any error, and decide
                if not self._control.is_over(form.generation):
                    report_fault(self._link, form.generation, form.step, FaultKind.HYDRATION, error)
                continue
            self._control.resized = form.change is not None
            # A change is sent again until the new world is formed; a worker that has joined it knows it already.
            if form.change is not None and form.change.generation > self._changed_in:
                self._changed_in, self._change = form.change.generation, form.change
            self._control.reformed = True
            return outcome.step if isinstance(outcome, Adopted) else None

    def take_change(self) -> WorldChange | None:
        """Change of the world's size since the last call, if there was one."""
        change, self._change = self._change, None
        return change

    def checkpoint(self) -> None:
        """At a step's boundary, take the copies of the state that are due."""
        self._copies.tick(self._state, self._control.step)
        self.snapshot()

    def snapshot(self) -> None:
        """Take a snapshot now if one for a durable checkpoint was ordered for this step or an earlier one."""
        asked = self._control.snapshot_due()
        if asked is not None and self._durable is not None:
            self._durable.snapshot(self._state, asked, self._control.step, Rank(self._link.env.rank))

    def _keep(self) -> None:
        """Copy the state to the agent's memory, if that was ordered for this step."""
        control = self._control
        order, control.keep = control.keep, None
        if order is None:
            return
        error = ""
        if control.step != order.step or not control.holds_state:
            error = f"rank {self._link.env.rank} is before step {control.step}"
        else:
            between = self._state.between
            then = (
                between.as_committed(order.step, over=control.over) if order.as_committed else contextlib.nullcontext()
            )
            try:
                self._recovery.accelerator.wait()
                with then:
                    self._copies.keep(self._state, order.step)
            except (RegrowError, RuntimeError, OSError) as failure:
                error = f"{type(failure).__name__}: {failure}"
        if error:
            self._link.send(StateKept(self._link.env.worker, order.step, error))

    def finish(self, *, goes_on: bool = False, training: FinishedTraining | None = None) -> bool:
        """After the last step, wait until no rank needs this rank's state; False if a new membership must be formed.

        Args:
            goes_on: wait only until all have run the last step; this is called again at the end of the script.
            training: the training that ends here, if the script has another one after it.
        """
        if self._link.failed:
            return True
        self._link.board.enter(Phase.WAITING)
        if self._over():
            return False
        worker, generation = self._link.env.worker, self._control.generation
        self._link.send(facts.WorkerFinished(worker, generation, self._control.step, goes_on, training))
        while not self._control.await_release(goes_on=goes_on):
            if self._over():
                return False
            self.checkpoint()
        return True

    def _over(self) -> bool:
        return self._control.halted
