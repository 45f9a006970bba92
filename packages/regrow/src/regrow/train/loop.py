"""Runs the steps of a script: each from its batch to its commit, again after a fault, and ends the training."""

import contextlib
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager

from regrow.core.errors import GenerationHalted, UsageError
from regrow.core.ids import StepNo
from regrow.core.messages.facts import WorkerCommitted
from regrow.core.messages.vocabulary import STATE_METRIC
from regrow.train.after_loop import AfterLoop
from regrow.train.announcing import Announcing
from regrow.train.gradients.ddp_buckets import Settling
from regrow.train.gradients.wrappers import Modules
from regrow.train.loop_context import LoopContext
from regrow.train.preparation import Preparation
from regrow.train.proving.shadow import Shadow
from regrow.train.rehearsal.echoed import echoed
from regrow.train.rehearsal.rehearsal import Rehearsal
from regrow.train.rehearsal.unprotected_changes import reachable
from regrow.train.restartable import RestartableCalls
from regrow.train.script.body_bindings import BodyBindings
from regrow.train.script.callers import script_frames
from regrow.train.script.expected_calls import may_call_collectives
from regrow.train.script.next_turn import LoopIterations
from regrow.train.script_place import ScriptPlace
from regrow.train.step import Step
from regrow.train.worker.accelerator import accelerator_of
from regrow.train.worker.participation import Participation
from regrow.train.worker.rejoin import WorkerReleased

STEPS = "steps()"
_EXACT = 13
"""Hexadecimal digits that a float holds exactly."""


class StepLoop(ScriptPlace):
    """The loop of steps of a worker; a training has one.

    Args:
        worker: how this process takes part in a job.
        seed: source of the order of data and of all random numbers of the steps.
        invariant: whether the result must not depend on the number of replicas.
    """

    def __init__(self, worker: Participation, *, seed: int, invariant: bool) -> None:
        self.worker, self.seed, self.invariant = worker, seed, invariant
        self.context = LoopContext(worker)
        self.modules = Modules()
        self.started = self._looping = self.left = False
        self._attempts: dict[StepNo, int] = {}
        self._preparation, self._announcing = Preparation(self.context), Announcing(worker)
        worker.body.waits = self._announcing.report_finished
        worker.body.ready = lambda: self._announcing.ready(self._latest, self.context.batches)
        self._latest: Step | None = None
        self.turns = LoopIterations(self._set_latest, sends=worker.rewrites)
        self._echoing = contextlib.ExitStack()
        self._owing = False
        """True if this worker has reported an error after its update, and so waits for the next membership."""
        self._at_boundary = True
        """True once the script has done all its work between two steps."""
        self.settling = Settling(worker.groups.echo)
        self._rehearsal = Rehearsal(self, self.context)
        self.shadow = Shadow(self, self.context)
        self.receive, self.draws = worker.body.logged, self.context.draws
        self.bindings = BodyBindings(writes=worker.rewrites)
        self.has_epochs = False
        """True if code may follow the steps of an epoch, which the text of the loop of steps does not show."""
        self.after = AfterLoop(self)
        self.restartables = RestartableCalls(self, self.after)

    def start(self, what: str) -> None:
        """Begin the one loop of a job. Raises `UsageError` if there was one before, or nothing is protected."""
        if self.started:
            raise UsageError(
                f"{what} is a second loop", hint="let `until` cover it all, or go over session.trainings(names)"
            )
        if self.worker.training.name and what != STEPS:
            raise UsageError(f"{what} is not one of several", hint="let session.trainings go over session.steps")
        if self.invariant and what != STEPS:
            raise UsageError(f"{what} has no micro-batches to be summed up", hint="leave invariant mode")
        self.started = self.context.built_state() is not None
        self.modules.complete()

    def arrive(self) -> None:
        """Report this worker as built and warm, so that it can join at the first step, or where the others are."""
        modules, dealer = self.modules, self.context.dealer
        modules.check_hooks()
        self.context.let_follow(modules.spanning)
        self.context.begins()
        self._announcing.accelerator = accelerator_of(self.context.protected().parameters())
        self.context.protected().follow(each for _, each in reachable(script_frames()))
        self.worker.arrive(
            self.context.protected(),
            modules.buckets(),
            modules.buffered,
            microbatches=dealer.most if dealer is not None else 0,
            fixed=self.context.fixed(),
            unprovable=self.shadow.cannot(),
        )

    def run(self, until: int) -> Iterator[Step]:
        """Yield the steps that are still to be run, up to number `until - 1`."""
        batches, worker = self.context.data(), self.worker
        end = self.began + until
        worker.groups.take_over(self.restartables)
        variables = self.context.built_state().variables
        variables.answers, variables.receive_answers = self.restartables.past.encoded, self.restartables.past.receive
        if worker.rehearses and until > 0:
            self.turns.requests_step(sys._getframe(1))
            with self.rehearsing():
                yield from self._rehearsal.run(*self.turns.walks())
            self._rehearsal.prove_loader()
        expected = worker.rehearses and (self.has_epochs or may_call_collectives(sys._getframe(1)))
        self.restartables.begin(expected=expected)
        self.shadow.can_skip = self.turns.known(sys._getframe(1))
        self.arrive()
        try:
            self._looping = True
            yield from self.shadow.prove()
            if not (yield from self.replay()):
                self.recover()
            while (more := worker.step < end and not self.context.others_left) or not self.ends():
                self.turns.requests_step(sys._getframe(1))
                self._latest = self.prepare() if more else None
                if self._latest is not None:
                    self._at_boundary = False
                    self._rehearsal.watch_first_steps()
                    yield self._latest
                    self._announcing.send()  # before looking at the state, so that nobody waits for that
                    self._end_between()
                    self._rehearsal.iterated(self._latest)
        except GeneratorExit:
            # The script left the loop early. It may be unwinding an error, so the others are waited for at its exit.
            self._looping = False
            self._end_between()
            over = self._latest is not None and self._latest.committed
            self.context.protected().variables.leave(over=over)
            if not self.left:
                self.after.left_early(over=over)
            raise
        finally:
            if not self.has_epochs:
                self.context.protected().variables.close()
            batches.close()

    def replay(self) -> Generator[Step, None, bool]:
        """Run the last committed step again, so that a newcomer reaches the function after it, in which the others are.

        The body runs against echo groups, and received state overwrites its results. False if no replay is needed.
        """
        self._latest = self._rehearsal.replayed(self._echoing)
        if self._latest is None:
            return False
        self._at_boundary = False
        yield self._latest
        self._announcing.send()
        self._end_between()
        if self._latest.rehearsal:
            raise UsageError("the body of the loop did not enter its step", hint="write `with step as batch:`")
        return True

    def prepare(self) -> Step | None:
        """Make all preparations for a body and return its step; None if the generation is over."""
        worker, state = self.worker, self.context.protected()
        if self.recover_if_halted():
            return None
        self.restartables.next_step_begins()
        if not worker.pass_boundary():
            self.recover()
            return None
        number = worker.step
        self.settling.settle(self.modules)
        if not self.agrees():
            return None
        self._preparation.checkpoint()
        self._announcing.report_finished()
        try:
            batch = self._preparation.fetch(number)
        except Exception as error:
            if not self.failed(error):
                raise
            return None
        self._preparation.fetched(number)
        self._rehearsal.asked()
        self.context.remember()
        if not worker.body.begin_step(number, state):
            return None
        self.shadow.begins(number, batch)
        attempt = self._attempts.get(number, 0)
        self._attempts = {number: attempt + 1}
        self._preparation.begun_at = time.monotonic()
        step = Step(self, number, batch, attempt=attempt)
        if worker.trial_steps:
            step.staged[STATE_METRIC] = float(int(state.digest()[:_EXACT], 16))
        return step

    def rehearsing(self) -> AbstractContextManager[None]:
        """Context in which collectives are answered locally; its end restores the state."""
        return echoed(self.worker, self.context.protected(), self.modules)

    # --- the end of a body -------------------------------------------------------------------------------------

    def before_update(self, *, closure: bool = False) -> None:
        """Called before protected state changes. Raises `GenerationHalted` if the state must not change.

        Args:
            closure: the optimizer has a closure that computes gradients.
        """
        if self.context.dealer is not None:
            self.context.dealer.check_complete()
        self.context.protected().updates()
        with self.shadow.aside():
            self.worker.body.before_update(self.modules.share_buffers, closure=closure)
        self.restartables.before_update(closure=closure)

    def after_update(self, optimizer: object) -> None:
        """Note that a protected optimizer has stepped."""
        self.worker.body.stepped(optimizer)
        self.restartables.after_update()

    def enter(self, step: Step) -> None:
        """Begin the body of a step, which the script enters: seed the random generators, and start its records."""
        self.context.protected().variables.enters()
        self.context.data().seed_body(step.at)
        self.worker.body.enter()
        self.shadow.enters()

    def leave(self, step: Step, error: BaseException | None) -> bool:
        """End the body; True if its exception is absorbed."""
        self.worker.body.left()
        if step.proof:
            return self.shadow.shadowed(step, error, sys._getframe(1))
        self.shadow.left(error)
        if step.replay:
            self._echoing.close()
            if error is None:
                self.recover()
                # Another fault may have struck meanwhile: the others may be at another step by now.
                step.rehearsal, step.committed = False, self.worker.step == step.at + 1
                self.restartables.expect(self.worker.restart_index if step.committed else 0)
            return False
        if step.rehearsal:
            if error is None:
                self._rehearsal.left()
                self.turns.refuse_left(sys._getframe(1))
            self.context.protected().between.rehearsed()
            return False
        if error is None:
            try:
                self._rehearsal.ended()
                if self.worker.body.commit(self.modules.share_buffers):
                    # A generation that is over is left only after the code that follows the step has run.
                    self._committed_itself(step)
                    return False
                error = GenerationHalted(f"step {step.number} was given up")
            except Exception as fault:  # noqa: BLE001  an error of the commit is reported like one of the body
                error = fault
        if not isinstance(error, Exception):
            self.worker.body.abandon()
            return False
        if self.worker.body.complete:
            # The step has made all its changes, so the error belongs to the code after it.
            self.worker.body.conclude()
            self._committed_itself(step)
            self._owing = self.worker.body.abort(error, self.context.protected())
            self.settling.cut_off(self.modules, error)
            return self._owing
        return self.failed(error, step)

    def _committed_itself(self, step: Step) -> None:
        """Note that this worker committed the step itself: the code that follows belongs to it."""
        self.committed(step)
        if self.worker.rehearses:
            self.context.protected().between.committed(self.worker.step)

    def committed(self, step: Step, *, adopted: bool = False) -> None:
        """Note that the step is committed; `adopted`: by other ranks, with this rank's gradients."""
        step.committed = True
        self.shadow.ends(well=not adopted)
        self.restartables.committed()
        self._announcing.committed(step, self._preparation, self.context.batches, adopted=adopted)

    def failed(self, error: Exception, step: Step | None = None) -> bool:
        """Handle the error of an attempt: report it if it is new, undo its changes, and go on when ordered to.

        False outside a job, which cannot recover: the error is the script's.
        """
        self.shadow.ends(well=False)
        error = self._announcing.flushed(error)
        if not self.worker.body.abort(error, self.context.protected()):
            return False
        self.settling.cut_off(self.modules, error)
        self.recover(step)
        self.turns.not_left(step, sys._getframe(1))
        return True

    def recover_if_halted(self) -> bool:
        """Join the next generation if the present one is over; True if it was."""
        if not (self.worker.halted or self._owing):
            return False
        self.recover()
        return True

    def recover(self, step: Step | None = None) -> None:
        """Wait for the next membership and join it; `step`: the step that this worker was in.

        Raises `WorkerReleased` if this worker is not a member.
        """
        self._owing = False
        self._announcing.flush()
        self.context.distinguish(closely=self._latest is not None)  # before it is decided who sends state to whom
        try:
            adopted = self.worker.waiting.rejoin(self.context.regroups.give_up)
        except WorkerReleased as leaving:
            # The loop or body that this unwinds may still run code, which does not concern the others.
            self.left, self._looping = True, False
            self._announcing.send()
            self._announcing.flush()
            self.context.hooks.notify(leaving.change, self.worker.step, leaving=True)
            raise
        if step is not None and adopted == step.at:
            # The others had all of this worker's gradients, and have committed the step without it.
            self.committed(step, adopted=True)
        self.modules.overwritten()
        if not self.context.follow_world():
            return self.recover(step)
        self.context.tell_change()
        self._place_after()
        self.after.recovered()
        self.restartables.recovered(self.worker.restart_index)

    def _place_after(self) -> None:
        """In a new generation, find out whether the state already includes the code after the step."""
        if self._at_boundary or self._latest is None:
            return
        worker, between = self.worker, self.context.protected().between
        if worker.restart_index and worker.step == self._latest.at + 1:
            between.resumed(worker.step)
        else:
            between.effects_included()
            self.restartables.skip()

    def announce(self, fact: WorkerCommitted) -> None:
        """Report a committed step of a training that has a loop of its own."""
        self._announcing.announce(fact)

    def log(self, step: Step) -> None:
        """Note numbers that were added to those of the step."""
        self._announcing.logged(step, self.context.batches)

    def agrees(self, *, last: bool = False) -> bool:
        """True if this rank's replicas have the same state, or were not compared; False: there is a new membership."""
        self.restartables.next_step_begins()
        try:
            if self.worker.compare(last=last):
                return True
        except Exception as error:
            if not self.failed(error):
                raise
            return False
        self.recover()
        return False

    def ends(self) -> bool:
        """Wait for the others after the last step; False if a new membership was formed, perhaps at an earlier step."""
        self.stops()
        ended = not self.recover_if_halted() and (self.worker.over or self.agrees(last=not self.context.others_left))
        if ended and not self.worker.over and not self.worker.waiting.finish(goes_on=True):
            self.recover()
            ended = False
        ended = ended or self.worker.over
        self._looping = not ended
        if ended and not self.has_epochs:
            self.after.begin()
        return ended

    def stops(self) -> None:
        """Send all reports on steps that are still due, as no step follows."""
        self._looping = False
        self._announcing.send()
        self._announcing.flush()

    def loops_left(self) -> None:
        """Called when all ranks have left their loops: no step runs again."""
        self.restartables.loops_left()
