"""Functions that run again after a fault: collectives between steps, and trainings that have a loop of their own."""

import contextlib
import functools
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar, overload

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from regrow.comm.observers import AskedCollective as Asked
from regrow.comm.past_calls import PastCalls
from regrow.comm.torch_private.internals import Work
from regrow.core.errors import GenerationHalted, Rehearsed, UsageError
from regrow.core.ids import Generation
from regrow.core.messages import facts
from regrow.data.seeding import seed_everything
from regrow.train.after_loop import AfterLoop
from regrow.train.lone_calls import Kept, LoneCall
from regrow.train.state.moment import ALWAYS
from regrow.train.state.restartable_effects import RestartableEffects
from regrow.train.step_runner import StepRunner

P = ParamSpec("P")
T = TypeVar("T")
Call = Callable[[], Any]
_STREAM = 1_000_003
"""Offset of the seed for each function between steps, so that it draws other numbers than the step that follows."""
_current: "RestartableCalls | None" = None
_declared = False
"""True if the script has functions that may run between its steps."""


class _Called(NamedTuple):
    """A call between two steps; `lone`: a collective without a restartable function around it."""

    name: str
    call: Call
    lone: bool = False


class RestartableCalls:
    """The restartable functions of one worker: those that it has called since its last step, in order.

    Args:
        loop: the loop that owns all restartable functions of the process from now on.
        after: recovery after the loop.
    """

    def __init__(self, loop: StepRunner, after: AfterLoop) -> None:
        global _current
        _current = self
        self._loop, self._after = loop, after
        self._context, self._worker = loop.context, loop.context.worker
        self._calls: list[_Called] = []
        self._kept = Kept()
        self._thread = threading.get_ident()
        self._watch: RestartableEffects | None = None
        self._at = 0
        self._due = 0
        self._unknown = False
        """True if a collective was called since the last step, before the script was known to call any there."""
        self._training = self._rehearsing = self._rehearsed = False
        self._seed: tuple[int, int, int] | None = None
        self._begun_at = 0.0
        self.past = PastCalls(self._doubt, lambda: self._worker.world)

    # --- between steps -----------------------------------------------------------------------------------------

    def work_of(self, call: Asked) -> Work | None:
        """Called for each collective: one of all ranks between two steps runs as a restartable function by itself.

        None if the collective is not of this kind, and is called as usual.
        """
        loop = self._loop
        if call.size == self._worker.world and not call.echoed and threading.get_ident() == self._thread:
            self._after.meets_others()
        if self._at or not loop.behind_a_body or call.size != self._worker.world or call.size == 1:
            return None
        if any(getattr(given, "asyncOp", False) for given in call.args):
            return None  # the script waits for it later, perhaps after a call that others make before this one
        if threading.get_ident() != self._thread:
            return None
        if not _declared:
            # This call, and those up to the next step, are called as usual: all ranks must count the same calls.
            self._declare()
            self._unknown = loop.between_steps
        if self._unknown or call.echoed or not loop.between_steps or not self._kept.takes(call):
            return None
        if not loop.runs_again:
            self._kept.add(call)
        work: Work = self.between(call.name, LoneCall(call), lone=True)
        return work

    def begin(self, *, expected: bool) -> None:
        """Prepare as the loop begins; `expected`: something may run between its steps, though nothing was seen yet."""
        if expected:
            self._declare()
        self.prepare()

    def _declare(self) -> None:
        """Note that something may run between steps, even if the script has not declared it."""
        global _declared
        if not _declared:
            _declared = True
            self.prepare()

    def prepare(self) -> None:
        """Prepare the worker and the state for what this script may run between its steps."""
        self._worker.expect_after_steps(self.declared())
        state = self._context.protected()
        state.between.serves_commits = state.modes.calls_between = self.declared() > 0

    def between(self, name: str, call: Call, *, lone: bool = False) -> Any:
        """Run a function as a restartable one between two steps; `lone`: a collective, which changes nothing else."""
        loop = self._loop
        self._after.meets_others()
        if self._at or not loop.between_steps:
            return call()
        if loop.runs_again:
            with self._worker.groups.echo():  # the others may not be here; all call it once the step is committed
                return call()
        self._calls.append(_Called(name, call, lone))
        number = len(self._calls)
        if number >= self._due:
            return self._run(number)
        # The others are past this function, unless all ranks have gone back and will call it again.
        again = self.past.again(number) if self._due < sys.maxsize else contextlib.nullcontext()
        with self._worker.groups.echo(), again:
            return call()

    def _run(self, number: int) -> Any:
        before, self._at = self._at, number
        try:
            return self._attempt(number)
        finally:
            self._at = before

    def _attempt(self, number: int) -> Any:
        loop, (name, call, lone) = self._loop, self._calls[number - 1]
        step_before = self._worker.step
        while True:
            if not self._training and self._worker.step != step_before:
                # All ranks went back to an older state, and will call this again; the others are not here now.
                with self._worker.groups.echo():
                    return call()
            if loop.recover_if_halted():
                continue
            if self._training:
                # A newcomer has no gradients, and an abandoned call may have left some.
                self._context.protected().drop_gradients()
            if not (self._enter_lone(number) if lone else self._enter(number, name)):
                continue
            try:
                watch = contextlib.nullcontext() if self._training or lone else self._watched.watch(name)
                with watch, self.past.function(number):
                    result = call()
            except Exception as error:
                if not loop.failed(error):
                    raise
                continue
            except BaseException:
                self._worker.body.abandon()
                raise
            self._worker.body.leave_restartable(0 if self._training else number + 1)
            if self._training and self._worker.halted:
                continue  # others may still need this worker in it
            return result

    @property
    def _watched(self) -> RestartableEffects:
        if self._watch is None:
            self._watch = RestartableEffects(self._context.protected())
        return self._watch

    def _enter(self, number: int, name: str) -> bool:
        loop = self._loop
        loop.settling.settle(loop.modules)
        if self._training:
            self._context.protected().begin()
        else:
            state, scope = self._context.protected(), self._watched.scope(name)
            state.between.extend(scope)
            state.begin_restartable(self._watched.entry(number), scope)
        if not self._worker.body.enter_restartable(number, self._context.protected() if self._training else None):
            return False
        step, (share, _) = self._worker.step, self._context.place()
        seed = loop.seed + (0 if self._training else _STREAM * number)
        self._seed = (seed, step, share) if self._training else None
        seed_everything(seed, step, share)
        self._context.protected().reseed(seed, step, share)
        self._begun_at = time.monotonic()
        return True

    def _enter_lone(self, number: int) -> bool:
        self._context.protected().begin_restartable(self._watched.entry(number), ALWAYS)
        return self._worker.body.enter_restartable(number, None)

    def committed(self) -> None:
        """Drop the functions before a committed step, which never run again, and expect those after it."""
        self.past.begin()
        self._forget()

    def _forget(self) -> None:
        self._calls.clear()
        self._kept.forget()
        self._due = 0
        self._unknown = False
        if self._watch is not None:
            self._watch.forget()

    def loops_left(self) -> None:
        """Drop the functions in the loop, which all ranks have left, and expect those after it."""
        self.past.end()
        self._forget()
        self._declare()
        self._worker.place_after_step(1)

    def skip(self) -> None:
        """Note that the state already has the effects of these functions: the script calls the remaining ones alone."""
        self._due = sys.maxsize

    def declared(self) -> int:
        """Number of the first function that may run after a step: 1, or 0 if the script has none."""
        return int(_declared)

    def next_step_begins(self) -> None:
        """Forget the calls since the last step: the next step begins."""
        self.past.end()
        self._worker.place_after_step(0)

    def recovered(self, first: int) -> None:
        """Run again the functions from number `first` on that this worker has left, as others may still be in them."""
        if self._context.protected().modes.calls_between:
            self._declare()
        last = self._at or len(self._calls) + 1
        if not first or first >= last:
            return
        with self._context.protected().between.leaves_no_trace():
            for number in range(first, last):
                if not self._calls[number - 1].lone:
                    self._watched.enter_again(number)
                self._run(number)

    def expect(self, first: int) -> None:
        """Bring a newcomer to function number `first` after a step, in which the other ranks are.

        `first` is 0 if the other ranks are past all functions after the step.
        """
        if first:
            self._declare()
            self.past.notes = True
        self._calls.clear()
        self._kept.forget()
        self._due = first or sys.maxsize
        self._worker.place_after_step(first)

    def _doubt(self, why: str) -> None:
        worker = self._worker
        text = (
            f"rank {worker.rank} was replaced when the others had ended a step, and ran alone the code that they "
            f"had run together: {why}. Its results there are its own"
        )
        worker.send(facts.WorkerNoted(worker.worker_id, text, doubts=True))

    # --- a whole training, instead of steps --------------------------------------------------------------------

    @property
    def running(self) -> bool:
        """True if the script is in a function that is the whole training, or in its rehearsal."""
        return self._rehearsing or (self._training and self._at > 0)

    def train(self, name: str, call: Call) -> Any:
        """Run a function that is the whole training."""
        loop = self._loop
        loop.start(f"the training {name}()")
        self._training = True
        register_module_forward_pre_hook(self._seed_at_forward)
        if not self._worker.rehearses:
            self._calls.append(_Called(name, call))
            return self._run(1)
        self._rehearse(name, call)
        loop.arrive()
        loop.recover()
        self._calls.append(_Called(name, call))
        result = self._run(1)
        self._after.finish()
        return result

    def _rehearse(self, name: str, call: Call) -> None:
        """Run the function against echo groups up to its first update, and undo it."""
        self._rehearsing, self._rehearsed = True, False
        try:
            with self._loop.rehearsing():
                call()
        finally:
            self._rehearsing = False
        if not self._rehearsed:
            raise UsageError(
                f"the training {name}() has ended without a step of a protected optimizer",
                hint="protect the model and the optimizer that it trains with, before it",
            )

    def _seed_at_forward(self, module: nn.Module, _: object) -> None:
        """Seed again at the first forward: a trainer that is called again may have drawn other numbers before it."""
        if self._seed is not None and module in self._context.protected().modules:
            parts, self._seed = self._seed, None
            seed_everything(*parts)
            self._context.protected().reseed(*parts)

    def before_update(self, *, closure: bool = False) -> None:
        """End the rehearsal before a protected optimizer steps, unless it has a closure that computes gradients."""
        if self._rehearsing and not closure:
            self._rehearsed = True
            raise Rehearsed

    def after_update(self) -> None:
        """Commit the step that a protected optimizer's update makes, if the function is the whole training."""
        if self._rehearsing:
            self._rehearsed = True
            raise Rehearsed
        if not self._training or not self._at:
            return
        worker = self._worker
        number, generation = worker.step, Generation(worker.generation)
        if not worker.body.commit(self._loop.modules.share_buffers):
            raise GenerationHalted(f"step {number} was given up")
        now = time.monotonic()
        self._loop.announce(facts.WorkerCommitted(worker.worker_id, generation, number, now, now - self._begun_at))
        if worker.halted or not worker.pass_boundary() or not self._enter(self._at, ""):
            raise GenerationHalted(f"the training goes on from step {worker.step} in a new generation")


def declare() -> None:
    """Declare, before any step, that functions and collectives may run between steps, even if the text shows none."""
    global _declared
    _declared = True


@overload
def restartable(function: Callable[P, T], /) -> Callable[P, T]: ...
@overload
def restartable(*, training: bool) -> Callable[[Callable[P, T]], Callable[P, T]]: ...
def restartable(function: Any = None, /, *, training: bool = False) -> Any:
    """Mark a function that is run again, in the same process, when a fault interrupts it.

    Use it for collectives between two steps: an evaluation, a checkpoint of your own. All ranks must call it at the
    same place; whether they do may depend on the step's number, not on computed values. It may run several times, on
    some ranks even after it has returned, so its side effects must be repeatable. After a step that must run again
    (`step.committed` is False) its collectives are answered locally, since it is called once more after that step.
    Inside a step's body it is part of the step. Before the loop, and in a process that regrow does not supervise, it is
    an ordinary call.

    Args:
        function: the function to run.
        training: the function is the whole training and replaces `session.steps`: a trainer class's `fit`, for
            example. Each update of a protected optimizer is then a step. After a fault it is called again with the
            protected objects as the last update left them, and must find its place from them. One per job.

    Raises:
        UsageError: (when called) `regrow.init` was not called before.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        global _declared
        _declared = _declared or not training

        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            if _current is None:
                raise UsageError(f"{function.__name__} is restartable", hint="call regrow.init() before it")
            call = functools.partial(function, *args, **kwargs)
            name = getattr(function, "__qualname__", repr(function))
            result: T = (_current.train if training else _current.between)(name, call)
            return result

        return run

    return decorate if function is None else decorate(function)
