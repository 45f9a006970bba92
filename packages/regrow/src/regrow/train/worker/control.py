"""The worker's side of the membership protocol: the thread that carries out orders, and the transaction's lock."""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import msgspec

from regrow.agent.workers.link import WorkerLink
from regrow.core.errors import AgentGone, DeadlineExceeded, GenerationHalted
from regrow.core.exit_codes import LOST_AGENT
from regrow.core.ids import NO_STATE, Generation, StepNo
from regrow.core.messages import facts, orders
from regrow.core.messages.copies import KeepState, SnapshotStored, TakeSnapshot
from regrow.core.messages.observations import ProveAlive, StacksTaken, TakeStacks, WorkerAlive
from regrow.core.messages.replacements import ProveReplacement
from regrow.core.messages.vocabulary import FaultSpec
from regrow.step.machine import Aborted, Adopted, Committed, Computing, Resumed, Stopped, Transaction, Updating
from regrow.train.worker.stacks import stacks


class WorkerPlace:
    """A worker's place in its transaction, and whether the job needs it."""

    _transaction: Transaction
    _form: orders.FormGeneration | None
    released: orders.ReleaseWorker | None
    own: Sequence[str] = ()  # places of variables of which each rank has its own value
    proving = False  # whether the script shadows a step of a rank, which is cut off when this worker is needed

    @property
    def step(self) -> StepNo:
        """The step that this worker is in, or will run next."""
        return self._transaction.step

    @property
    def halted(self) -> bool:
        """True if the generation is over."""
        return self._transaction.halted is not None

    def is_over(self, generation: Generation) -> bool:
        """True if this generation was given up."""
        halted = self._transaction.halted
        return halted is not None and halted >= generation

    @property
    def updating(self) -> bool:
        """True while protected state is being changed."""
        return isinstance(self._transaction.state, Updating)

    @property
    def interruptible(self) -> bool:
        """True while the training thread is in a body whose result is not needed."""
        return (self.halted and isinstance(self._transaction.state, Computing)) or (self.proving and self.waited_for)

    @property
    def waited_for(self) -> bool:
        """True if a membership waits for this worker, or if its release does."""
        return self._form is not None or self.released is not None


class Control(WorkerPlace):
    """Receives orders and sends facts.

    Args:
        link: the channel to the agent.
        stop: ends any call in which the training thread is blocked (a collective, hydration, a forward pass).
        arm: arms a fault on demand.
        stored: called when the agent has a copy of the state.
    """

    def __init__(
        self,
        link: WorkerLink,
        *,
        stop: Callable[[], None],
        arm: Callable[[FaultSpec], None],
        stored: Callable[[SnapshotStored], None],
    ) -> None:
        self.link = link
        self.generation = Generation(0)
        """The generation that this worker is in, or is forming."""
        self.verified = NO_STATE
        """Step of the copy of the state on which all replicas agreed; `NO_STATE` if there is none."""
        self._stop, self._arm, self._stored = stop, arm, stored
        self._patience = link.env.patience
        """Longest wait for the coordinator's verdict; the coordinator waits less long for nodes."""
        self._transaction = Transaction()
        self._changed = threading.Condition()
        self._form: orders.FormGeneration | None = None
        self.released: orders.ReleaseWorker | None = None
        """Order to release this worker, once no rank needs its state any more; None before."""
        self.over = False
        """True once all ranks have run the last step."""
        self.resized = False
        """True if the present generation has another size than the one before."""
        self.reformed = False
        """True if the world was re-formed since this worker's last step, so that others may be at another one."""
        self._snapshot_at: StepNo | None = None
        self.keep: KeepState | None = None  # order to put the state into the agent's memory; cleared when done
        self._proof: ProveReplacement | None = None
        self.on_wanted: Callable[[], None] = lambda: None  # called from the control thread
        self.on_stop: Callable[[], None] = lambda: None  # called before it reports that it is at the agreed step
        self.whole_body = False
        """True if bodies are undone with their updates, on all ranks, since some rank has found that necessary."""
        self.all_whole = False
        """True if all ranks of this generation undo bodies with their updates."""
        self.restart_index = 0
        """Number of the restartable function after its last step that this worker is in or may run next; 0: none."""
        self.first_restart = 0
        """Value of `restart_index` right after the commit of a step."""
        self._unreported_halt: Generation | None = None
        self._waiting = False  # whether the script waits for the coordinator's verdict
        self._wait_reported: Generation | None = None
        """Newest generation for which it was reported that the script waits for the next one."""

    def start(self) -> None:
        """Carry out orders from now on."""
        threading.Thread(target=self._obey, name="regrow-control", daemon=True).start()

    # --- the control thread ------------------------------------------------------------------------------------

    def _obey(self) -> None:
        try:
            for order in self.link.orders():
                match order:
                    case orders.HaltGeneration(at=None):
                        self._halt(order)
                    case orders.HaltGeneration(at=int(at)):
                        self._halt_before(StepNo(at), order.generation)
                    case orders.FormGeneration():
                        with self._changed:
                            self._form = order
                            self._changed.notify_all()
                        self.on_wanted()
                    case orders.ReleaseWorker():
                        with self._changed:
                            if order.goes_on:
                                self.over = True
                            else:
                                self.released = order
                            self._changed.notify_all()
                        self.on_wanted()
                    case TakeSnapshot() | KeepState() | ProveReplacement():
                        with self._changed:
                            if isinstance(order, TakeSnapshot):
                                self._snapshot_at = order.step
                            elif isinstance(order, KeepState):
                                self.keep = order
                            else:
                                self._proof = order
                            self._changed.notify_all()
                    case orders.KeepOwn():
                        self.own = order.places
                    case orders.ArmFault():
                        self._arm(order.fault)
                    case SnapshotStored():
                        self._stored(order)
                    case ProveAlive():
                        self.link.send(WorkerAlive(order.worker))
                    case TakeStacks():
                        self.link.send(StacksTaken(order.worker, stacks(order.reason)))
        except AgentGone:
            self.link.complain()
        # Nobody supervises this process any more; its peers know it, or have lost their agent too.
        os._exit(LOST_AGENT)

    def _halt(self, order: orders.HaltGeneration) -> None:
        with self._changed:
            if order.generation < self.generation:
                return
            if self._form is not None and self._form.generation <= order.generation:
                self._form = None
            state_at = self._transaction.halt(order.generation).state_at
            ready = self._transaction.is_ready
            self._unreported_halt = order.generation if state_at is None else None
            self._changed.notify_all()
        self._stop()
        if state_at is not None:
            self._send_halted(order.generation, state_at, ready)

    def _halt_before(self, step: StepNo, generation: Generation) -> None:
        with self._changed:
            if generation != self.generation or self.halted or self._transaction.stop_before(step):
                return
            begun = self._transaction.step
        self.link.send(facts.HaltMissed(self.link.env.worker, generation, step, begun))

    def _send_halted(self, generation: Generation, state_at: StepNo, ready: bool) -> None:
        with self._changed:  # so that the script cannot report that it waits before this reports that it does not yet
            waits = self._waiting
            if waits:
                self._wait_reported = generation
            index = self.first_restart if ready else self.restart_index  # its place once it has updated
            name = self.link.env.worker
            halted = facts.WorkerHalted(name, generation, state_at, ready, index, self.verified, stands=waits)
            if self.whole_body or state_at == NO_STATE:
                halted = msgspec.structs.replace(halted, whole_body=self.whole_body, step=self.step)
            self.link.send(halted)

    @contextmanager
    def _at_rest(self) -> Iterator[None]:
        """Context in which the script waits for the coordinator; a halted worker reports it to the others."""
        with self._changed:
            self._waiting = True
            halted, state_at = self._transaction.halted, self._transaction.state_at
            if halted is not None and state_at is not None and halted != self._wait_reported:
                self._send_halted(halted, state_at, self._transaction.is_ready)
            try:
                yield
            finally:
                self._waiting = False

    def pass_boundary(self) -> bool:
        """Begin the next step, after all code between steps; False if this worker stops here, as planned."""
        with self._changed:
            if self._transaction.pass_boundary(self.generation):
                return True
            self._unreported_halt = self.generation
        self.on_stop()
        self._notify()
        return False

    def begin(self) -> bool:
        """Start an attempt; False if the generation is over."""
        with self._changed:
            return self._transaction.begin()

    def ready(self) -> bool:
        """Note that the update has all it needs; False if no body runs."""
        with self._changed:
            ready = self._transaction.ready()
        self._notify()
        return ready

    def update(self) -> bool:
        """Begin the update; False if protected state must not change, or a verdict has to be awaited."""
        with self._changed:
            return self._transaction.update()

    def await_verdict(self) -> bool:
        """After `update` was refused to a ready worker, wait for the next membership, which decides about the step.

        True if the update has begun. `await_form` will still return the membership. Raises `DeadlineExceeded`.
        """
        with self._at_rest():
            if not self._changed.wait_for(lambda: self._form is not None or self.keep is not None, self._patience):
                late = f"no verdict on generation {self.generation} within {self._patience:.0f} s"
                raise DeadlineExceeded(late, hint="see the coordinator's log")
            form = self._form  # None: protected state stays as it was before the update
            return form is not None and form.restore is None and self._transaction.roll_forward(form.step)

    def commit(self) -> Committed | Aborted:
        """Commit a body that ended without an error."""
        with self._changed:
            outcome = self._transaction.commit()
            if isinstance(outcome, Committed):
                self.restart_index = self.first_restart
        self._notify()
        return outcome

    def fail(self) -> None:
        """End a body after an error."""
        with self._changed:
            self._transaction.fail()
        self._notify()

    def end_without_update(self) -> None:
        """End a body that had no update and no error."""
        with self._changed:
            self._transaction.end_without_update()
        self._notify()

    @property
    def state_at(self) -> StepNo | None:
        """The n of this worker's `state@n`; None in the middle of a body."""
        return self._transaction.state_at

    @property
    def holds_state(self) -> bool:
        """True if this worker has state, which must not be dropped before newer state has arrived."""
        state_at = self._transaction.state_at
        return state_at is not None and state_at >= 0

    @property
    def torn(self) -> bool:
        """True if an update was cut off, so that the state belongs to no step."""
        return isinstance(self._transaction.state, Stopped) and not self.holds_state

    def replace(self, generation: Generation) -> None:
        """Begin to replace this worker's state by a newer one. Raises `GenerationHalted` if the generation is over."""
        with self._changed:
            if self.is_over(generation) or not self._transaction.replace():
                raise GenerationHalted(f"generation {generation} was given up before its state was in place")

    def replaced(self, step: StepNo) -> None:
        """Note that this worker's state is now `state@step`."""
        with self._changed:
            self._transaction.replaced(step)
        self._notify()

    def resume(
        self, generation: Generation, step: StepNo, *, sharded: bool = False, restarts: bool = True
    ) -> Resumed | Adopted | None:
        """Enter the new generation; None if it was given up meanwhile.

        Args:
            sharded: the generation's ranks have different parts of the state, and vote.
            restarts: restartable functions after the last step are still to be run.
        """
        with self._changed:
            if self.is_over(generation):
                return None
            before = self._transaction.step
            outcome = self._transaction.resume(step, sharded=sharded)
            if isinstance(outcome, Adopted):
                self.restart_index = self.first_restart if restarts else 0
            elif step != before:
                self.restart_index = 0
            return outcome

    def _notify(self) -> None:
        """Report the step of this worker's state, if it was not known when the generation was halted."""
        with self._changed:
            generation, state_at = self._unreported_halt, self._transaction.state_at
            if generation is None or state_at is None:
                return
            self._unreported_halt, ready = None, self._transaction.is_ready
        self._send_halted(generation, state_at, ready)

    @property
    def _snapshot_wanted(self) -> bool:
        return self._snapshot_at is not None and self._snapshot_at <= self.step and self.holds_state

    def snapshot_due(self) -> StepNo | None:
        """At a step's boundary: the step for which a snapshot was ordered, once it is reached or passed."""
        with self._changed:
            if not self._snapshot_wanted:
                return None
            asked, self._snapshot_at = self._snapshot_at, None
            return asked

    @property
    def _asked(self) -> bool:
        return self.released is not None or self.keep is not None or self._snapshot_wanted

    def peek_form(self) -> orders.FormGeneration:
        """Wait for the next membership, which `await_form` will still return. Raises `DeadlineExceeded`."""
        with self._at_rest():
            self._changed.wait_for(lambda: self._form is not None, self._patience)
            if self._form is None:
                raise DeadlineExceeded(f"no membership within {self._patience:.0f} s", hint="see the coordinator's log")
            return self._form

    def await_proof(self) -> ProveReplacement | None:
        """Wait for the order to prove a replacement; None if the worker is needed, or no order came in time."""
        with self._at_rest():
            self._changed.wait_for(lambda: self.waited_for or self._proof is not None, self._patience)
            proof, self._proof = self._proof, None
            return None if self.waited_for else proof

    def await_form(self) -> orders.FormGeneration | None:
        """Wait for the next membership; None if this worker is released instead, or a copy of its state was requested.

        Raises `DeadlineExceeded`.
        """
        with self._at_rest():
            self._changed.wait_for(lambda: self._form is not None or self._asked, self._patience)
            form, self._form = self._form, None
            if form is not None:
                self.generation = form.generation
                self.whole_body, self.all_whole = self.whole_body or form.whole_body, form.whole_body
            elif not self._asked:
                late = f"no verdict on generation {self.generation} within {self._patience:.0f} s"
                raise DeadlineExceeded(late, hint="see the coordinator's log")
            return form

    def await_release(self, *, goes_on: bool) -> bool:
        """Wait until all ranks have finished; with `goes_on`, until they have finished their steps.

        False if the generation is over before that, or a snapshot of the last state is due. Raises `DeadlineExceeded`.
        """
        with self._changed:

            def let_go() -> bool:
                return self.released is not None or (goes_on and self.over)

            if not self._changed.wait_for(lambda: let_go() or self.halted or self._snapshot_wanted, self._patience):
                raise DeadlineExceeded(
                    f"the other ranks did not finish within {self._patience:.0f} s",
                    hint="did one leave the loop early?",
                )
            # A worker that leaves a job that continues is first halted, and then released.
            return let_go() and not self.halted
