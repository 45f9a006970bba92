"""Functions that run again after a fault: collectives between steps, and trainings that have a loop of their own."""

import functools
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

from regrow.core.errors import GenerationHalted, UsageError
from regrow.core.ids import Generation
from regrow.data.seeding import seed_everything

if TYPE_CHECKING:
    from regrow.train.session import Session

P = ParamSpec("P")
T = TypeVar("T")
Call = Callable[[], Any]
_STREAM = 1_000_003
"""Functions between steps draw other random numbers than the step that follows."""
_current: "Regions | None" = None
_declared = False
"""Whether the script has functions that may run between its steps."""


class _Rehearsed(Exception):
    """The training's function has come to its first update: the rehearsal is over."""


class Regions:
    """The restartable functions of one worker: those that it has called since its last step, in order.

    Args:
        session: whose; its restartable functions are this worker's from now on.
    """

    def __init__(self, session: "Session") -> None:
        global _current
        _current = self
        self._session = session
        self._calls: list[Call] = []
        self._at = 0
        self._due = 0
        self._training = self._rehearsing = False
        self._begun_at = 0.0

    # --- between steps -----------------------------------------------------------------------------------------

    def between(self, name: str, call: Call) -> Any:
        """Run a function that may stand between two steps."""
        session = self._session
        if self._at or not session._between_steps:
            return call()
        if session._runs_again:
            with session._member.local():  # the others may not be here; all come here when the step has happened
                return call()
        self._calls.append(call)
        number = len(self._calls)
        if number >= self._due:
            return self._run(number)
        with session._member.local():  # the others are past it; what it computes here is not the others' result
            return call()

    def _run(self, number: int) -> Any:
        before, self._at = self._at, number
        try:
            result = self._attempt(number)
        finally:
            self._at = before
        return result

    def _attempt(self, number: int) -> Any:
        session, call = self._session, self._calls[number - 1]
        stands = session._member.step
        while True:
            if not self._training and session._member.step != stands:
                # All went back to an older state, and will come here again; the others are not here now.
                with session._member.local():
                    return call()
            if session._recover_if_halted():
                continue
            if self._training:
                # A newcomer has none, and a call that was given up may have left some.
                session._protected().drop_gradients()
            if not self._enter(number):
                continue
            try:
                result = call()
            except Exception as error:
                if not session._failed(error):
                    raise
                continue
            except BaseException:
                session._member.abandon()
                raise
            session._member.leave_region(0 if self._training else number + 1)
            if self._training and session._member.halted:
                continue  # others may still need this worker in it
            return result

    def _enter(self, number: int) -> bool:
        session = self._session
        session._settle()
        session._protected().begin()
        if not session._member.enter_region(number, training=self._training):
            return False
        step, (share, _) = session._member.step, session._place()
        seed_everything(session.seed + (0 if self._training else _STREAM * number), step, share)
        self._begun_at = time.monotonic()
        return True

    def committed(self) -> None:
        """A step was committed: nobody comes back to what was before it, and what stands after it begins."""
        self._calls.clear()
        self._due = 0

    def declared(self) -> int:
        """The first function that may be run after a step: 1, or 0 where the script has none."""
        return int(_declared)

    def passed(self) -> None:
        """What stands after a step has been run; the next one begins."""
        self._session._member.place_after_step(0)

    def recovered(self, first: int) -> None:
        """Others may still run the function numbered `first`: all run again from there that this one has left."""
        if first:
            for number in range(first, self._at or len(self._calls) + 1):
                self._run(number)

    def expect(self, first: int) -> None:
        """This worker is a newcomer that comes to what stands after a step; the others run those from `first` on.

        0: they are past all of them.
        """
        self._calls.clear()
        self._due = first or sys.maxsize
        self._session._member.place_after_step(first)

    # --- in the place of steps ---------------------------------------------------------------------------------

    def train(self, name: str, call: Call) -> Any:
        """Run a function that is the whole training."""
        session = self._session
        if not session._member.rehearses:
            return call()
        session._start(f"the training {name}()")
        self._training = True
        self._rehearse(call)
        session._arrive()
        session._recover()
        self._calls.append(call)
        result = self._run(1)
        session._finish()
        return result

    def _rehearse(self, call: Call) -> None:
        """Run the function against echo groups up to its first update, and undo it."""
        session = self._session
        self._rehearsing = True
        try:
            with session._rehearsing():
                call()
        except _Rehearsed:
            pass  # as far as a rehearsal goes
        finally:
            self._rehearsing = False

    def before_update(self) -> None:
        """A protected optimizer is about to step."""
        if self._rehearsing:
            raise _Rehearsed

    def after_update(self) -> None:
        """A protected optimizer has made its step: in a training of its own that is a step of the job."""
        if not self._training or self._rehearsing or not self._at:
            return
        member = self._session._member
        number, generation = member.step, Generation(member.generation)
        if not member.commit():
            raise GenerationHalted(f"step {number} was given up")
        now = time.monotonic()
        member.announce(number, generation, now, now - self._begun_at, {}, adopted=False)
        if member.halted or not member.pass_boundary() or not self._enter(self._at):
            raise GenerationHalted(f"the training goes on from step {member.step} in a new generation")


@overload
def restartable(function: Callable[P, T], /) -> Callable[P, T]: ...
@overload
def restartable(*, training: bool) -> Callable[[Callable[P, T]], Callable[P, T]]: ...
def restartable(function: Any = None, /, *, training: bool = False) -> Any:
    """Mark a function that is run again, in the same process, when a fault ends it in its middle.

    Between two steps it is how collectives are used: an evaluation, a checkpoint of one's own. All ranks must call it,
    at the same place; whether they do may depend on the step's number, not on what was computed. It may run several
    times, on some ranks also after it had already returned, so what it does besides computing should bear that. After a
    step that must run again (`step.committed` is False) its collectives are answered locally: it is called once more.
    Inside a step's body it is part of the step. Before the loop, and in a process that regrow does not supervise, it is
    an ordinary call.

    Args:
        function: what to run.
        training: it is the whole training, and stands in the place of `session.steps`: a trainer class's `fit`, for
            example. Each update of a protected optimizer is then a step. After a fault it is called again with the
            protected objects as the last update left them: it must find its place from them. One a job.

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
