"""The gate between a computed step and its update."""

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
        link: the channel to the agent.
        control: receives the orders.
        groups: this worker's groups.
        faults: injects faults on demand.
        copies: copies of the state in the agent's memory.
    """

    def __init__(
        self, link: WorkerLink, control: Control, groups: Groups, faults: FaultInjector, copies: BuddyCopies
    ) -> None:
        self._link, self._control, self._groups = link, control, groups
        self._faults, self._copies = faults, copies
        self.accelerator: Accelerator = Processor()
        """Device that computes the gradients."""
        self.check: NumberCheck | None = None
        """Check that the numbers of the step are finite on all ranks; None if there is none."""
        self.waits: Callable[[], None] = lambda: None
        """Called during a wait for the device, which may be long, to report what the device has finished before."""
        self.ready: Callable[[], None] = lambda: None
        """Called when the update has all it needs: from then on others may commit the step without this worker."""

    def enter(
        self,
        last_collective: Callable[[], None],
        recovery: Recovery,
        *,
        interrupted: bool = False,
        must_vote: bool = False,
    ) -> None:
        """Enter the update. Raises `GenerationHalted` if protected state must not change.

        Args:
            last_collective: makes the last exchange that all ranks need before they update.
            recovery: has the readers of this worker's state.
            interrupted: the body was cut off in a forward, though it may have gone on.
            must_vote: all ranks must arrive here before any goes on, since the body is over and can still be undone,
                or may have done something else than the others' bodies.
        """
        step = self._control.step
        self._groups.draining = True
        try:
            last_collective()
        finally:
            self._groups.draining = False
        if self._groups.in_flight or recovery.sharded or must_vote:
            # A collective cut off by an abort looks finished. All other work runs in order, before the update.
            self.accelerator.wait(self.waits)
            self.waits()
            self._groups.in_flight = False
        # The body may have caught an error of a collective: then its gradients differ from the others'.
        cut_off = interrupted or self._groups.refused or self._groups.broke()
        if cut_off or (self.accelerator.enqueues and self._control.halted):
            raise GenerationHalted(f"step {step} was given up before its gradients were there")
        if self.check is not None:
            env = self._link.env
            self.check.agree(step, rank=env.rank, world=env.world, sharded=recovery.sharded)
        self.ready()
        if recovery.sharded or must_vote:
            self._agree(step)
        self._faults.inject(FaultStage.UPDATE, step)
        recovery.withdraw(time.monotonic() + WITHDRAW_S)
        if not self._control.update():
            raise GenerationHalted(f"step {step} was given up before its update")
        self._link.board.enter(Phase.UPDATING)

    def _agree(self, step: StepNo) -> None:
        """Begin the update once all ranks are ready, or once the verdict says that the step is committed.

        Raises `GenerationHalted` if the step must run again.
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
        """Wait until every rank is ready; False if the generation is over, or about to be."""
        self._copies.await_stored()
        if self._over():
            return False
        try:
            self._groups.vote()
        except RuntimeError as error:  # raised by a halted or broken collective
            if not self._over():
                report_fault(self._link, self._control.generation, step, FaultKind.COLLECTIVE, error)
            return False
        return True

    def _over(self) -> bool:
        return self._control.halted
