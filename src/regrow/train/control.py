"""The worker's side of the membership protocol: a thread that takes orders, and the lock around the transaction."""

import os
import threading
from collections.abc import Callable

from regrow.agent.link import AgentGone, WorkerLink
from regrow.core.errors import DeadlineExceeded, GenerationHalted
from regrow.core.ids import Generation, Seconds, StepNo
from regrow.core.messages import (
    ArmFault,
    FaultSpec,
    FormGeneration,
    HaltGeneration,
    ReleaseWorker,
    WorkerHalted,
)
from regrow.step.machine import Aborted, Adopted, Committed, Computing, Resumed, Transaction, Updating

VERDICT_S: Seconds = 3600.0
LOST_AGENT = 1


class Control:
    """Orders in, facts out.

    Args:
        link: the channel to the agent.
        stop: ends whatever the training thread is blocked in (collectives, hydration, a forward pass).
        arm: takes in a fault on demand.
    """

    def __init__(self, link: WorkerLink, *, stop: Callable[[], None], arm: Callable[[FaultSpec], None]) -> None:
        self.link = link
        self.generation = Generation(0)
        """The generation this worker is in, or is forming."""
        self._stop, self._arm = stop, arm
        self._transaction = Transaction()
        self._changed = threading.Condition()
        self._form: FormGeneration | None = None
        self._released = False
        self._untold: Generation | None = None

    def start(self) -> None:
        """Take orders from now on."""
        threading.Thread(target=self._obey, name="regrow-control", daemon=True).start()

    # --- the control thread ------------------------------------------------------------------------------------

    def _obey(self) -> None:
        try:
            for order in self.link.orders():
                match order:
                    case HaltGeneration():
                        self._halt(order)
                    case FormGeneration():
                        with self._changed:
                            self._form = order
                            self._changed.notify_all()
                    case ReleaseWorker():
                        with self._changed:
                            self._released = True
                            self._changed.notify_all()
                    case ArmFault():
                        self._arm(order.fault)
                    case _:
                        pass
        except AgentGone:
            pass
        # Nobody supervises this process any more; its peers have been told, or have lost their agent too.
        os._exit(LOST_AGENT)

    def _halt(self, order: HaltGeneration) -> None:
        with self._changed:
            if order.generation < self.generation:
                return
            if self._form is not None and self._form.generation <= order.generation:
                self._form = None
            state_at = self._transaction.halt(order.generation).state_at
            self._untold = order.generation if state_at is None else None
            self._changed.notify_all()
        self._stop()
        if state_at is not None:
            self.link.send(WorkerHalted(self.link.env.worker, order.generation, state_at))

    # --- the training thread -----------------------------------------------------------------------------------

    @property
    def step(self) -> StepNo:
        """The step this worker is in or stands before."""
        return self._transaction.step

    @property
    def halted(self) -> bool:
        """Whether the generation is over."""
        return self._transaction.halted is not None

    def is_over(self, generation: Generation) -> bool:
        """Whether this generation was given up."""
        halted = self._transaction.halted
        return halted is not None and halted >= generation

    @property
    def updating(self) -> bool:
        """Whether protected state is being changed."""
        return isinstance(self._transaction.state, Updating)

    @property
    def interruptible(self) -> bool:
        """Whether the training thread is in a body whose result nobody needs."""
        return self.halted and isinstance(self._transaction.state, Computing)

    def begin(self) -> bool:
        """Start an attempt; False when the generation is over."""
        with self._changed:
            return self._transaction.begin()

    def update(self) -> bool:
        """Start to change protected state; False when it must stay as it is."""
        with self._changed:
            return self._transaction.update()

    def commit(self) -> Committed | Aborted:
        """The body has ended without an error."""
        with self._changed:
            outcome = self._transaction.commit()
        self._tell()
        return outcome

    def fail(self) -> None:
        """The body has ended with an error."""
        with self._changed:
            self._transaction.fail()
        self._tell()

    @property
    def holds_state(self) -> bool:
        """Whether this worker has state of its own, that must not be given up before there is better."""
        state_at = self._transaction.state_at
        return state_at is not None and state_at >= 0

    def replace(self, generation: Generation) -> None:
        """Newer state is about to be put in the place of the own. Raises `GenerationHalted` when that is not wanted."""
        with self._changed:
            if self.is_over(generation) or not self._transaction.replace():
                raise GenerationHalted(f"generation {generation} was given up before its state was in place")

    def replaced(self, step: StepNo) -> None:
        """The own state is now `state@step`."""
        with self._changed:
            self._transaction.replaced(step)
        self._tell()

    def resume(self, generation: Generation, step: StepNo) -> Resumed | Adopted | None:
        """The new generation stands; None when it was given up meanwhile."""
        with self._changed:
            if self.is_over(generation):
                return None
            return self._transaction.resume(step)

    def _tell(self) -> None:
        """Say where the state stands, if that could not be said when the halt came."""
        with self._changed:
            generation, state_at = self._untold, self._transaction.state_at
            if generation is None or state_at is None:
                return
            self._untold = None
        self.link.send(WorkerHalted(self.link.env.worker, generation, state_at))

    def await_form(self, deadline: Seconds = VERDICT_S) -> FormGeneration:
        """The next membership. Raises `DeadlineExceeded`."""
        with self._changed:
            self._changed.wait_for(lambda: self._form is not None, deadline)
            form, self._form = self._form, None
            if form is None:
                raise DeadlineExceeded(
                    f"no verdict on generation {self.generation} within {deadline:.0f} s",
                    hint="see the coordinator's log",
                )
            self.generation = form.generation
            return form

    def await_release(self, deadline: Seconds = VERDICT_S) -> bool:
        """Whether all ranks have finished; False: the generation is over first. Raises `DeadlineExceeded`."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._released or self.halted, deadline):
                raise DeadlineExceeded(
                    f"the other ranks did not finish within {deadline:.0f} s", hint="did one leave the loop early?"
                )
            return self._released
