"""The way from a computed step into its update."""

import time
from collections.abc import Callable

from regrow.agent.workers.link import WorkerLink
from regrow.comm.groups import Groups
from regrow.core.errors import GenerationHalted
from regrow.core.ids import Seconds, StepNo
from regrow.core.messages.vocabulary import FaultKind, FaultStage
from regrow.core.phase import Phase
from regrow.train.state.buddy_copies import BuddyCopies
from regrow.train.worker.accelerator import Accelerator, Processor
from regrow.train.worker.control import Control
from regrow.train.worker.fault_injection import FaultInjector
from regrow.train.worker.finite import NumberCheck
from regrow.train.worker.recovery import Recovery
from regrow.train.worker.rejoin import report_fault

WITHDRAW_S: Seconds = 60.0


class UpdateGate:
    """Lets a worker into its update, or sends it back.

    Args:
        link: to the agent.
        control: knows the orders.
        groups: of this worker.
        faults: on demand.
        copies: of the state, in the agent's memory.
    """

    def __init__(
        self, link: WorkerLink, control: Control, groups: Groups, faults: FaultInjector, copies: BuddyCopies
    ) -> None:
        self._link, self._control, self._groups = link, control, groups
        self._faults, self._copies = faults, copies
        self.accelerator: Accelerator = Processor()
        """Device with the gradients."""
        self.check: NumberCheck | None = None
        """Check that the numbers of the step are finite on all ranks; None: there is none."""
        self.waits: Callable[[], None] = lambda: None
        """Called while the device is waited for, which may last: what it has done before this body is to be told."""
        self.ready: Callable[[], None] = lambda: None
        """Called when all is there that the update needs: others may commit the step without this worker then."""

    def enter(
        self,
        last_collective: Callable[[], None],
        recovery: Recovery,
        *,
        interrupted: bool = False,
        asks: bool = False,
    ) -> None:
        """Protected state is about to change. Raises `GenerationHalted` when it must stay as it is.

        Args:
            last_collective: what all ranks still have to exchange before they update.
            recovery: knows who reads this worker's state.
            interrupted: the body was cut off in a forward, though it may have gone on.
            asks: no rank may go on before all have come so far: the body is over, and can still be undone, or it is not
                known to have done what the others do.
        """
        step = self._control.step
        self._groups.draining = True
        try:
            last_collective()
        finally:
            self._groups.draining = False
        if self._groups.in_flight or recovery.sharded or asks:
            # What an abort has cut off looks done. All else a device does in its order, and the update comes behind it.
            self.accelerator.wait(self.waits)
            self.waits()
            self._groups.in_flight = False
        # The body may have caught what a collective raised: what it has is not what the others have.
        cut_off = interrupted or self._groups.refused or self._groups.broke()
        if cut_off or (self.accelerator.enqueues and self._control.halted):
            raise GenerationHalted(f"step {step} was given up before its gradients were there")
        if self.check is not None:
            env = self._link.env
            self.check.agree(step, rank=env.rank, world=env.world, sharded=recovery.sharded)
        self.ready()
        if recovery.sharded or asks:
            self._agree(step)
        self._faults.inject(FaultStage.UPDATE, step)
        recovery.withdraw(time.monotonic() + WITHDRAW_S)
        if not self._control.update():
            raise GenerationHalted(f"step {step} was given up before its update")
        self._link.board.enter(Phase.UPDATING)

    def _agree(self, step: StepNo) -> None:
        """Begin the update when all ranks can, or when the verdict says that it has happened.

        Raises `GenerationHalted` when the step must run again.
        """
        if self._control.ready() and self._vote(step):
            self._faults.inject(FaultStage.VOTE, step)
            if self._control.update():
                return
        self._link.board.enter(Phase.WAITING)
        if not self._control.await_verdict():
            raise GenerationHalted(f"step {step} was given up: not all ranks were ready for its update")
        self._link.board.enter(Phase.UPDATING)
        self._faults.inject(FaultStage.ROLL, step)

    def _vote(self, step: StepNo) -> bool:
        """Wait until every rank is ready; False: the generation is over, or about to be."""
        self._copies.settle()
        if self._over():
            return False
        try:
            self._groups.vote()
        except RuntimeError as error:  # what a collective raises, halted or broken
            if not self._over():
                report_fault(self._link, self._control.generation, step, FaultKind.COLLECTIVE, error)
            return False
        return True

    def _over(self) -> bool:
        return self._control.halted
