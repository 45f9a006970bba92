"""A worker's part in the body of a step: from its beginning through the gate to its commit or rollback."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch

from regrow.agent.workers.link import WorkerLink
from regrow.comm.groups import Groups
from regrow.comm.observers import CallObserver
from regrow.core.errors import CollectiveMisuse, GenerationHalted, NotFinite, StepGivenUp, UsageError
from regrow.core.ids import Seconds, StepNo
from regrow.core.messages import facts
from regrow.core.messages.replicas import OwnValues
from regrow.core.messages.vocabulary import FaultKind, FaultStage, Role
from regrow.core.phase import Phase
from regrow.step.call_counts import CallCounts
from regrow.step.machine import Committed
from regrow.train import own_values
from regrow.train.state.protected import ProtectedState
from regrow.train.worker.control import Control
from regrow.train.worker.failed_device import leave_if_device_failed
from regrow.train.worker.fault_injection import FaultInjector
from regrow.train.worker.fetching import Fetching
from regrow.train.worker.finite import NumberCheck
from regrow.train.worker.interrupt import ForwardInterrupt
from regrow.train.worker.own_time import OwnTime
from regrow.train.worker.recovery import Recovery
from regrow.train.worker.rejoin import report_fault
from regrow.train.worker.update_gate import UpdateGate
from regrow.train.worker.updates import Updates

CAUSE_S: Seconds = 2.0
"""Longest wait for a report of a death that explains an error of a body."""


class Body(CallObserver):
    """Progress of the present body, and its end: commit or abort.

    Args:
        link: the channel to the agent.
        control: receives the orders.
        groups: this worker's groups.
        faults: injects faults on demand.
        gate: lets a worker into its update.
    """

    def __init__(
        self, link: WorkerLink, control: Control, groups: Groups, faults: FaultInjector, gate: UpdateGate
    ) -> None:
        self._link, self._control, self._groups = link, control, groups
        self._faults, self._gate = faults, gate
        self.interrupt = ForwardInterrupt(lambda: control.interruptible and self.entered)
        self.updates = Updates()
        self.begun = self.entered = False
        """`begun`: an attempt is under way. `entered`: the script is in its body, where it can be interrupted."""
        self.rehearsing = self.updated = False
        self._whole = False
        """True if all state was remembered at the beginning, since this body cannot be separated from its update."""
        self._costs_said = False
        self.recovery: Recovery | None = None
        """Provides the readers of this worker's state; None before the worker has arrived."""
        self.fetching = Fetching()
        self.own = OwnTime(link.env.spec.unit)
        self._counts = CallCounts(link.env.generation if link.env.role is Role.RANK else None)
        self._counted = False
        self.reads: Callable[[], str] = str
        """Describes for people the reads of the step."""
        self.waits: Callable[[], None] = lambda: None
        self.ready: Callable[[], None] = lambda: None
        self.awaits_causes = False
        """True if the script uses connections of its own: an error may follow from a death not yet reported."""
        gate.waits, gate.ready = lambda: self.waits(), self._gets_ready
        control.on_stop = lambda: self._leave_own(control.step, sure=True, begun=False)
        self._finite = NumberCheck(groups.least) if link.env.spec.check_for_nan else None
        if self._finite is not None:
            gate.check = self._finite
        self.checks: tuple[CallObserver, ...] = () if self._finite is None else (self._finite,)

    def _gets_ready(self) -> None:
        self._leave_own(StepNo(self._control.step + 1), sure=False, begun=False)
        self.ready()

    def _leave_own(self, step: StepNo, *, sure: bool, begun: bool) -> None:
        """Store this rank's own values outside of this process, for the worker that replaces it."""
        if self._control.own and self.recovery is not None:
            values = own_values.left(self.recovery.state.variables, self._control.own, as_begun=begun)
            self._link.board.show_own(OwnValues(step, values, sure))

    def begin(self, state: ProtectedState | None) -> bool:
        """Start an attempt; False if the generation is over. `state`: the state that the body may change."""
        self.interrupt.clear()
        if not self._control.begin():
            return False
        self._control.whole_body = self.whole_body  # the other ranks learn of it when this generation is over
        self._whole = state is not None and self.whole_body
        if state is not None and self._whole:
            state.begin(whole=True)
            self._say_what_it_costs(state.nbytes)
        self.begun, self.entered = True, False
        self.updates.begin()
        return True

    def called(self, name: str, size: int) -> None:
        """Count a collective of the body: see `CallObserver.called`."""
        self.fetching.called(name, size)
        self.updates.called(name, size)
        self._counts.called(size, self._link.env.world)
        self.own.called(name)

    def _say_what_it_costs(self, size: Callable[[], int]) -> None:
        if self._costs_said or self._link.env.rank != 0:
            return
        self._costs_said = True
        why = self.updates.torn_apart or "on some rank a collective is called"
        self._link.send(
            facts.WorkerNoted(
                self._link.env.worker,
                f"{why} once a body has begun to update, so a fault undoes the whole body: each step keeps a copy of "
                f"the protected state ({size() / 1e6:,.1f} MB); none is needed where all collectives come before the "
                "first optimizer.step(), or after the step",
            )
        )

    @property
    def whole_body(self) -> bool:
        """True if an abort undoes the body together with its updates, as collectives are mixed with them."""
        return self._control.whole_body or bool(self.updates.torn_apart)

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Context of the rehearsal: updates are applied locally, and their properties are remembered."""
        self.rehearsing = True
        self.updates.begin(learning=True)
        self._counts.rehearse()
        try:
            yield
            if self.updated:
                self._counts.completed()
        finally:
            self.updates.end_body()
            self.rehearsing = False

    def watch(self, objects: Iterable[object]) -> None:
        """Watch these protected objects, to learn which of them a body changes, and when."""
        known = list(objects)
        self.updates.watch(known)
        if self._finite is not None:
            self._finite.watch(known)

    def logged(self, numbers: Mapping[str, torch.Tensor | float]) -> None:
        """Check numbers of this rank that the script has logged, if numbers are checked."""
        if self._finite is not None:
            self._finite.logged(numbers)

    def stepped(self, optimizer: object) -> None:
        """Note that a protected optimizer has stepped."""
        self.updates.stepped(optimizer)

    def enter(self) -> None:
        """Note that the script enters the body of a step, in which it can be interrupted."""
        self.entered = True

    def left(self) -> None:
        """Note that the script has left the body; the code that follows is not part of it."""
        self.entered = False
        self.updates.end_body()
        if self.rehearsing:
            self.updates.ended()

    def before_update(self, last_collective: Callable[[], None], *, closure: bool = False) -> None:
        """Called before protected state changes. Raises `GenerationHalted` if the state must not change.

        Args:
            last_collective: makes the last exchange that all ranks need before they update.
            closure: the optimizer has a closure that computes gradients.
        """
        if self.rehearsing:
            self.updated = True
            self._counts.must_vote()
            self.updates.began(closure=closure)
            return
        if not self.begun or self.recovery is None or self._control.updating:
            return
        self.own.end()
        if self._finite is not None:
            self._finite.look()
        if not self._whole:
            cut_off = self.interrupt.struck
            self._gate.enter(last_collective, self.recovery, interrupted=cut_off, must_vote=self._must_vote())
        self.updates.began(closure=closure)

    def _must_vote(self) -> bool:
        """True if all ranks must vote before the update. Raises `CollectiveMisuse` if no collective was called."""
        if not self._counted or self._control.halted:
            return False
        must_vote = self._counts.must_vote()
        if self._counts.skipped:
            raise CollectiveMisuse(
                f"the body of step {self._control.step} has called no collective up to its update, as each body before "
                "has: the gradients would be this rank's alone",
                hint="a body that was cut off has left a setting that keeps the next one from reducing; set it anew "
                "where a body begins",
            )
        return must_vote

    def commit(self, last_collective: Callable[[], None]) -> bool:
        """Commit a body that ended without an error; False if it must run again all the same.

        A body that has not passed the gate does so now. Raises what `before_update` raises.
        """
        self.updates.end_body()
        self.own.end()
        if self.begun and self.recovery is not None and not self._control.updating:
            whole, cut_off = self._control.all_whole, self.interrupt.struck
            self._gate.enter(last_collective, self.recovery, interrupted=cut_off, must_vote=self._must_vote() or whole)
        self._faults.leave()
        self._faults.inject(FaultStage.COMMIT, self._control.step)
        return self.conclude()

    def conclude(self) -> bool:
        """Commit the step, as all its changes are made."""
        self._faults.leave()
        self._link.board.enter(Phase.OUTSIDE)
        done = isinstance(self._control.commit(), Committed)
        if done:
            self.begun = self._whole = False
            self.updates.ended()
            if self._counted:
                self._counts.completed()
        return done

    @property
    def own_time(self) -> Seconds:
        """Time that the newest body took up to its update without waiting for others; 0 if not known."""
        return self.own.seconds

    @property
    def in_flight(self) -> bool:
        """True if a collective may still be under way on a device, whose numbers an abort would spoil."""
        return self._groups.in_flight

    @property
    def complete(self) -> bool:
        """True if all changes of this step are made, so that an error now belongs to the code after it."""
        return self.begun and self._control.updating and self.updates.complete

    def abort(self, error: Exception, state: ProtectedState) -> bool:
        """Undo the changes of a failed attempt, and report the error unless the generation is over already."""
        self.left()
        self._faults.leave()
        leave_if_device_failed(self._link, error)
        self._link.board.enter(Phase.RECOVERING)
        if self.awaits_causes and not isinstance(error, GenerationHalted | UsageError) and not self._control.halted:
            self.interrupt.await_set(CAUSE_S)
        news, step = not self._control.halted, self._control.step
        if self.begun and not self._control.updating:
            self._put_back(state, step)
        elif self.begun:
            state.attributes.put_back()  # the state is torn, and will be received from others
        if self._control.updating and self.updates.torn_apart and not self._control.whole_body:
            text = f"{self.updates.torn_apart} once step {step} had begun to update, which the rehearsal did not show"
            self._link.send(facts.WorkerNoted(self._link.env.worker, f"{text}: this fault has struck in its middle"))
        self.begun = self._whole = False
        self._control.fail()
        if isinstance(error, NotFinite):
            error.add_note(self.reads())
        if news and not isinstance(error, StepGivenUp):
            kind = FaultKind.COLLECTIVE if self._symptom(error) else FaultKind.BODY
            report_fault(self._link, self._control.generation, step, kind, error)
        return True

    def _put_back(self, state: ProtectedState, step: StepNo) -> None:
        lost = state.rollback()
        if lost:
            text = f"{lost[0]} was changed before the first update of step {step}, in which it never was before"
            cure = "change it after optimizer.step(), or in the first step too"
            apart = next((graph.apart for graph in state.graphs() if graph.apart), "")
            text = apart or f"{text}: this fault has struck just there ({cure})"
            self._link.send(facts.WorkerNoted(self._link.env.worker, text))
            self._control.update()  # this change cannot be undone: the state is torn

    def _symptom(self, error: Exception) -> bool:
        """True if the error follows from a fault elsewhere, as far as this worker can tell."""
        if isinstance(error, CollectiveMisuse | UsageError):
            return False
        return isinstance(error, GenerationHalted) or (self._groups.broke() and self._groups.misuse() is None)

    def abandon(self) -> None:
        """Give up a body that the script leaves by `SystemExit` or an interrupt."""
        self._control.restart_index = 0
        self.left()
        self._faults.leave()
        self.begun = self._whole = False
        self._control.fail()

    def begin_step(self, number: StepNo, state: ProtectedState) -> bool:
        """Start the body of a step; False if the generation is over."""
        if not self.begin(state):
            return False
        self._leave_own(number, sure=True, begun=True)
        self._counted = True
        self._counts.begin(self._control.generation, self._link.env.world)
        self._faults.inject(FaultStage.BEGIN, number)
        self._faults.enter(number)
        self._link.board.enter(Phase.COMPUTING)
        self.own.begin()
        if self._finite is not None:
            self._finite.begin()
        return True

    def enter_restartable(self, number: int, training: ProtectedState | None) -> bool:
        """Start the `number`th restartable function since the last step; False if the generation is over.

        Args:
            training: the state that it trains, if it is the whole training; None if it runs between two steps.
        """
        if not self.begin(training):
            return False
        self._control.restart_index, self.entered, self._counted = number, True, False
        (self._faults.enter if training is not None else self._faults.enter_between)(self._control.step)
        phase = Phase.COMPUTING if training is not None else Phase.REGION
        self._link.board.enter(phase, step=self._control.step, generation=self._control.generation)
        return True

    def leave_restartable(self, following: int) -> None:
        """End a restartable function that returned; number `following` may run next."""
        self._faults.leave()
        self._control.restart_index, self.begun, self.entered = following, False, False
        self._control.end_without_update()
        self._link.board.enter(Phase.OUTSIDE)
