"""Functions that are run again after a fault: collectives between steps, and trainings that have a loop of their own."""

import functools
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
        self._calls.append(call)
        number = len(self._calls)
        if number < self._due:
            with session._member.local():  # the others are past it; what it computes here is not the others' result
                return call()
        return self._run(number)

    def _run(self, number: int) -> Any:
        before, self._at = self._at, number
        try:
            result = self._attempt(number)
        finally:
            self._at = before
        if number >= self._due:
            self._due = 0
        return result

    def _attempt(self, number: int) -> Any:
        session, call = self._session, self._calls[number - 1]
        while True:
            if session._recover_if_halted() or not self._enter(number):
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
            session._member.leave_region()
            if self._training and session._member.halted:
                continue  # others may still need this worker in it
            return result

    def _enter(self, number: int) -> bool:
        session = self._session
        session._protected().begin()
        if not session._member.enter_region(number, training=self._training):
            return False
        step, (share, _) = session._member.step, session._place()
        seed_everything(session.seed + (0 if self._training else _STREAM * number), step, share)
        self._begun_at = time.monotonic()
        return True

    def committed(self) -> None:
        """A step was committed: nobody comes back to what was before it."""
        if not self._training:
            self._calls.clear()

    def recovered(self, first: int) -> None:
        """Others are in the function numbered `first`: run all again from there that this worker has already left."""
        if first:
            for number in range(first, self._at or len(self._calls) + 1):
                self._run(number)

    def expect(self, first: int) -> None:
        """This worker is a newcomer, and the others are in the function numbered `first` since their last step."""
        self._calls.clear()
        self._due = first

    def check(self) -> None:
        """A step is about to begin. Raises `UsageError` where a newcomer did not come to the function the others ran."""
        if self._due:
            raise UsageError(
                f"after step {self._session._member.step - 1} the other ranks called a restartable function that this "
                "worker, which has just joined, did not",
                hint="let it depend on the step's number alone whether it is called",
            )

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
        if member.halted or not self._enter(self._at):
            raise GenerationHalted(f"the training goes on from step {member.step} in a new generation")


@overload
def restartable(function: Callable[P, T], /) -> Callable[P, T]: ...
@overload
def restartable(*, training: bool) -> Callable[[Callable[P, T]], Callable[P, T]]: ...
def restartable(function: Any = None, /, *, training: bool = False) -> Any:
    """Mark a function that is run again, in the same process, when a fault ends it in its middle.

    Between two steps it is how collectives are used: an evaluation, a checkpoint of one's own. All ranks must call it,
    at the same place; whether they do may depend on the step's number, not on what was computed. It may run several
    times, on some ranks also after it had already returned, so what it does besides computing should bear that.
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
