"""A training that is written as a loop of epochs, with a loop of steps in each.

Both loops share one iterator of steps. The loop of an epoch ends before the next step is requested. So code after an
epoch follows the epoch's last step: its effects are kept, it is run again, and its effects are sent to newcomers, like
those of all code after a step (decisions 0012, 0025, 0031).
"""

import contextlib
from collections.abc import Generator, Iterator

from regrow.core.errors import UsageError
from regrow.train.loop import StepLoop
from regrow.train.step import Step


class Epoch:
    """The steps of one epoch, iterated once: `for step in epoch`. Its `len` is the number of steps in an epoch.

    Used as a string or an index, an epoch is its number, so it can be passed to a function that prints the epoch.

    Args:
        owner: the loop of epochs that yields it.
    """

    def __init__(self, owner: "Epochs") -> None:
        self._owner = owner

    @property
    def number(self) -> int:
        """Number of the epoch, from 0. Read it each time: a replaced rank begins in the middle of the training."""
        return self._owner.number

    def __index__(self) -> int:
        return self.number

    def __int__(self) -> int:
        return self.number

    def __str__(self) -> str:
        return str(self.number)

    def __format__(self, spec: str) -> str:
        return format(self.number, spec)

    def __len__(self) -> int:
        return self._owner.length

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[Step]:
        steps = self._owner.steps_of_turn(self)
        self._owner.walked(steps)
        return steps


class Epochs:
    """The loop over epochs of one worker.

    Args:
        loop: runs the steps.
        steps: iterator over all steps.
        length: steps of an epoch.
        until: steps of the training.
    """

    def __init__(self, loop: StepLoop, steps: Iterator[Step], *, length: int, until: int) -> None:
        self.length = length
        self._loop, self._steps, self._until = loop, steps, until
        self._turn: Epoch | None = None
        self._step: Step | None = None
        """Last step given to the script in this epoch."""
        self._pending: Step | None = None
        self._ended = False
        """True once the script has iterated over the steps of this epoch."""
        self._over = False
        """True once there are no more steps."""
        self._alone = contextlib.ExitStack()

    @property
    def number(self) -> int:
        """Number of the epoch of the last step given, or of the next step if this epoch has given none yet.

        0 until this rank requests its first step, as it learns only then at which step it joins.
        """
        if self._step is not None and not self._step.rehearsal:
            return self._step.number // self.length
        return max(0, min(self._steps_done, self._until - 1)) // self.length

    @property
    def _steps_done(self) -> int:
        return self._loop.worker.step - self._loop.began

    def run(self) -> Iterator[Epoch]:
        """Yield the epochs still to be run, and again those to which the training goes back."""
        try:
            while not self._over and not self._has_ended():
                self._turn, self._step, self._ended = Epoch(self), self._pending, False
                yield self._turn
                self._alone.close()
                self._refuse_passed_over()
            self._loop.after.begin()
        finally:
            self._alone.close()
            self._loop.context.protected().variables.close()
            if isinstance(self._steps, Generator):
                self._steps.close()

    def walked(self, iterator: Iterator[object]) -> None:
        """Note that the script iterates over `iterator` too: code that counts its items counts steps."""
        self._loop.turns.add_iterator(iterator)

    def steps_of_turn(self, turn: Epoch) -> Iterator[Step]:
        """The steps of an epoch. Raises `UsageError` if `turn` is not the present epoch, or was iterated before."""
        if turn is not self._turn or self._ended:
            raise UsageError(
                "the steps of an epoch are gone through a second time", hint="write `for step in epoch:` once in it"
            )
        pending, self._pending = self._pending, None
        if pending is not None:
            yield pending
        while not self._is_at_end():
            step = next(self._steps, None)
            if step is None:
                # The training is over. The others have run the code after this epoch: here it runs alone, and its
                # collectives return what the others received.
                self._over = True
                self._loop.after.passes_by()
                self._alone.enter_context(self._loop.worker.groups.echo())
                self._alone.enter_context(self._loop.restartables.past.again())
                break
            self._step = step
            yield step
        self._ended = True

    def _is_at_end(self) -> bool:
        """True if the last step given is committed, ends its epoch, and the state is the one right after it.

        If the state has gone back meanwhile, steps of this epoch are still to be run.
        """
        step = self._step
        if step is None or not step.committed or self._steps_done != step.number + 1:
            return False
        return (step.number + 1) % self.length == 0 or step.number + 1 >= self._until

    def _has_ended(self) -> bool:
        """True if no epoch follows. The last step may be run again until all ranks have passed the code after it."""
        if self._step is None and self._turn is None:
            return self._until == 0
        if self._steps_done >= self._until:
            self._pending = next(self._steps, None)
            self._loop.turns.forget()  # requested by a loop of epochs, whose next iteration is not that step again
            return self._pending is None
        return False

    def _refuse_passed_over(self) -> None:
        if self._ended:
            return
        if self._step is None:
            raise UsageError(
                f"epoch {self.number} was passed over: its steps were not gone through",
                hint="write `for step in epoch:` in each turn; regrow finds the epoch to go on with by itself, so "
                "leave out what skips epochs after a restart",
            )
        raise UsageError(
            f"the steps of epoch {self.number} were left in their middle, and another epoch is asked for",
            hint="make epochs shorter, session.epochs(..., length=...), or leave both loops",
        )
