"""The rehearsal: a run of the loop's body before the first step, and the checks of the script during it."""

import contextlib
import sys
from collections.abc import Iterator
from functools import partial
from types import FrameType

import msgspec

from regrow.core.errors import StateError, UsageError
from regrow.core.ids import StepNo
from regrow.core.wire import MAX_FRAME_BYTES
from regrow.train.attributes.keepers import Keepers
from regrow.train.graphs.object_graph import living
from regrow.train.loop_context import LoopContext
from regrow.train.rehearsal.leftover_gradients import GATHERED, INSIDE_ONE, GatheredGradients, Leftovers
from regrow.train.rehearsal.unprotected_changes import Unprotected
from regrow.train.script.callers import READ_AHEAD, counted_by, script_frames, script_loops
from regrow.train.state.protected import ProtectedState
from regrow.train.step import Step, StepOwner
from regrow.train.values.untouched import Untouched
from regrow.train.worker.participation import Participation

_WATCHED_STEPS = 2
_GATHERING_STEPS = 4
_ROOM = 4 << 20
"""Room for the names and shapes of tensors, which are in the same message."""


class Rehearsal:
    """Runs the loop's body against echo groups, once or twice, and observes it.

    Args:
        owner: the runner of the steps.
        context: context of the loop.
    """

    def __init__(self, owner: StepOwner, context: LoopContext) -> None:
        self._owner, self._context = owner, context
        self._unprotected: Unprotected | None = None
        self._to_watch = _WATCHED_STEPS
        self._seeded: set[str] = set()
        self._gathering, self._steps = GatheredGradients(), 0
        self.step: Step | None = None
        """The step that is being rehearsed; None at other times."""

    def run(self, *steps: object) -> Iterator[Step]:
        """Yield the steps to be rehearsed, which have no effect. Raises `UsageError` for a script that cannot recover.

        Args:
            steps: the iterators that the script uses.
        """
        worker, state = self._context.worker, self._context.protected()
        if worker.holds_initial_state:
            self._refuse_counters(*steps)
        yield from self._body()
        left = Leftovers(state.parameters())
        if left and not worker.rehearsed():
            with left.refuse_to_add():
                yield from self._body()
        state.variables.rehearsed = True
        check_update(worker, state)
        if too_large := beyond_a_message(state):
            worker.note_of_script(too_large)

    def prove_loader(self) -> None:
        """Prepare the loader for step 0, after the rehearsal, whose changes were undone.

        Raises `UsageError` if the loader now gives another batch for that step.
        """
        batches = self._context.data()
        if self._context.worker.holds_initial_state and (note := batches.prove(self._owner.began)):
            self._context.worker.note_of_script(note)
        batches.seek(self._owner.began)

    def _body(self) -> Iterator[Step]:
        first, worker = self._owner.began, self._context.worker
        batch = self._context.data().batch(first)
        variables = self._context.protected().variables
        frames, known = script_frames(), living(self._context.protected().graphs())
        things = Keepers(frames, self._context.held(), self._context.loader, known, around=script_loops())
        if not worker.rewrites:
            note = partial(worker.note_of_script, doubts=True)
            variables.places.untouched = Untouched(note, ignores=variables.is_clock)
        variables.is_newcomer = not worker.holds_initial_state
        variables.follow(script_frames, keepers=things)
        variables.requests_step()
        before = variables.take()
        variables.begin()
        self.step = step = Step(self._owner, first, batch, rehearsal=True)
        self._watch(sys._getframe(1))
        yield step
        self.step = None
        self._context.protected().between.ends()
        self.iterated(step)
        variables.places.objects.leave_alone(self._context.draws.outside)
        variables.take()  # learns which variables have changed
        variables.put_back(before)
        variables.begin()
        if variables.places.untouched is not None:
            variables.places.untouched.rehearsed(refuses=worker.holds_initial_state)

    def replayed(self, echoing: contextlib.ExitStack) -> Step | None:
        """Step that a newcomer must run again: the last committed one, if others are in a function after it; else None.

        Args:
            echoing: entered with a context in which collectives are answered locally.
        """
        worker = self._context.worker
        number, inside = (StepNo(0), 0) if worker.holds_initial_state else worker.await_position()
        if not inside or number <= self._owner.began:
            return None
        before = StepNo(number - 1)
        echoing.enter_context(worker.echo())
        return Step(self._owner, before, self._context.data().batch(before), rehearsal=True, replay=True)

    def asked(self) -> None:
        """Called when the script requests a step: follow its plain variables for that step."""
        if not self._context.worker.rehearses:
            return
        variables = self._context.protected().variables
        variables.requests_step()
        while variables.notes:
            self._context.worker.note_of_script(variables.notes.pop())

    def watch_first_steps(self) -> None:
        """Watch the first steps, since some code of a script runs only after a step that was committed."""
        self._gathering.begins()
        if self._to_watch and self._context.worker.rehearses:
            self._to_watch -= 1
            self._watch(sys._getframe(1))

    def _watch(self, innermost: FrameType) -> None:
        if self._unprotected is not None:  # left by a body that was cut off
            self._unprotected.stop()
        if self._context.worker.holds_initial_state:
            state, objects, frames = self._context.protected(), self._context.objects, script_frames(innermost)
            seeds, draws = self.step is not None or bool(self._seeded), self._context.draws.outside
            self._unprotected = Unprotected(
                state, objects, frames, seeds=seeds, first=self.step is not None, outside=draws
            )

    def left(self) -> None:
        """Check the rehearsed body at its end. Raises `UsageError` if it used unprotected generators or iterators."""
        if self._unprotected is not None:
            self._unprotected.refuse_drawn()
            self._seeded |= self._unprotected.seeded
            if self.step is not None and self._context.data().dealer is None:  # a dealer fetches in the body
                self._unprotected.refuse_taken()

    def ended(self) -> None:
        """Check the body of a step at its end.

        Raises `UsageError` if it has drawn, without seeding, from a generator that the rehearsed body had seeded.
        """
        if self._unprotected is not None:
            self._unprotected.refuse_unseeded(self._seeded)

    def iterated(self, step: Step) -> None:
        """Check the iteration of `step`, as the script requests the next step.

        Raises `UsageError` if it has not entered `step`, or has changed unprotected objects.
        """
        if not step.entered:
            raise UsageError("the body of the loop did not enter its step", hint="write `with step as batch:`")
        if not step.rehearsal and self._steps < _GATHERING_STEPS and self._context.worker.holds_initial_state:
            self._follow_gradients(step)
        watched, self._unprotected = self._unprotected, None
        if watched is not None:
            watched.stop()
            watched.refuse_changed()
            watched.refuse_waiting()

    def _follow_gradients(self, step: Step) -> None:
        self._steps += 1
        state = self._context.protected()
        most = self._steps == _GATHERING_STEPS or self._gathering.found or not step.committed
        try:
            updated = most or state.parameters_changed()
        except StateError:  # the state after the step was received from another rank
            updated = True
        self._gathering.ended(state.parameters(), updated=updated)
        if self._gathering.found:
            self._steps = _GATHERING_STEPS
            reported = f"{GATHERED}: a fault between the two loses them. To mend that, {INSIDE_ONE}"
            self._context.worker.note_of_script(reported)

    @staticmethod
    def _refuse_counters(*steps: object) -> None:
        counter = counted_by(*steps)
        if counter in READ_AHEAD:
            raise UsageError(
                f"{counter} asks for the next step before the script has run the code after the last one: that code "
                "would run when the next step has begun, and could not be run again after a fault",
                hint="write `for epoch in session.epochs(loader, epochs):` and in it `for step in epoch:`; the "
                "code that ends an epoch comes after the inner loop",
            )
        if counter:
            raise UsageError(
                f"{counter} counts what session.steps gives, the rehearsal too, and in a rank that is replaced it "
                "begins at 0 in the middle of the training",
                hint="write `for step in session.steps(..., until=...)`, and take step.number where a count is needed; "
                "epochs are session.epochs(loader, epochs)",
            )


def beyond_a_message(state: ProtectedState, most: int = MAX_FRAME_BYTES - _ROOM) -> str:
    """Explain which Python state is too large for the one message in which a newcomer receives it; empty if none is."""
    python = state.canonical()[0].python
    if len(python) <= most:
        return ""
    parts: dict[str, bytes] = msgspec.msgpack.decode(python)["objects"]
    name, largest = max(parts.items(), key=lambda part: len(part[1]), default=("", b""))
    return (
        f"the protected Python state has {len(python) / 1e6:,.1f} MB, {len(largest) / 1e6:,.1f} of them in {name}: a "
        f"rank that is replaced gets it in one message of at most {most / 1e6:,.0f} MB, so no fault could be mended. "
        "Keep large things in tensors or arrays, which may have any size"
    )


def check_update(worker: Participation, state: ProtectedState) -> None:
    """Check a body at its end. Raises `UsageError` if it changed parameters without a protected optimizer."""
    if worker.rehearsed():
        return
    if state.parameters_changed():
        raise UsageError(
            "the step's body changes protected parameters, but no protected optimizer did",
            hint="protect the optimizer too, or call step.update() before the change",
        )
    if state.optimizers():
        worker.note_of_script(
            "the rehearsed body made no update: no protected optimizer has stepped. Where gradients are "
            "gathered over several steps, gather them inside one; where another optimizer steps, protect it"
        )
