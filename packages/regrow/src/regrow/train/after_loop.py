"""Recovery after the loop: restartable functions and collectives there run again after a fault until the script ends.

All ranks leave their loops together, once each has run the last step. From then on the loop is over for all of them: a
replaced rank receives the last state, skips the loop, and runs the code after it, where the other ranks repeat what
they have run already. No rank ends its process, or destroys the group of all ranks, before all have reached that point.
See decision 0057.
"""

from regrow.core.errors import StateError
from regrow.core.messages.trainings import FinishedTraining
from regrow.core.process.forks import at_exit, not_at_exit
from regrow.train.step_runner import StepRunner


class AfterLoop:
    """The time between the last step and the end of the script.

    Args:
        loop: the loop that the script leaves.
    """

    def __init__(self, loop: StepRunner) -> None:
        self._loop = loop
        self._early = self._begun = self._ended = False

    @property
    def open(self) -> bool:
        """True while the script is past its loop and can still recover from a fault there."""
        return self._begun and not self._ended

    def begin(self, *, early: bool = False) -> None:
        """Begin the time after the loop, which all ranks leave. `early`: the script left it before its last step."""
        worker, state = self._loop.context.worker, self._loop.context.protected()
        if self._begun:
            return
        if self._loop.context.batches is not None and not early:  # the script may have seeded generators meanwhile
            # A newcomer has not drawn the last body's numbers. Seeded under plain python and torchrun too, to agree.
            self._loop.context.batches.seed_body(worker.step)
        if not worker.over:
            return
        self._begun = True
        self._loop.loops_left()
        state.between.after_last_step(worker.step)
        state.variables.leave(over=True)
        worker.groups.on_leaving = self.end
        at_exit(self.end)

    def left_early(self, *, over: bool) -> None:
        """Note that the script has left its loop before its end.

        It may be unwinding an error, so it waits for the others later: at its next collective, or at its exit.

        Args:
            over: the script left after a committed step, so no step follows.
        """
        self._early = over
        at_exit(self.finish)

    def meets_others(self) -> None:
        """Called before a call of all ranks: if this script left its loop early, wait until all have left theirs."""
        if self._early and not self._loop.context.worker.leaves_others:
            self._early = False
            not_at_exit(self.finish)
            self.finish(goes_on=True)
            self.begin(early=True)

    def passes_by(self) -> None:
        """Note that this worker joined after all had left the loop, and still runs the rest of its last iteration."""
        if self._loop.context.worker.over:
            self._loop.context.protected().between.passes_by(self._loop.context.worker.step)

    def recovered(self) -> None:
        """Called in a new generation: a worker still in its loop, which all others have left, runs nothing again."""
        if self._loop.context.worker.over and not self._begun:
            self._loop.loops_left()

    def finish(self, *, goes_on: bool = False, training: FinishedTraining | None = None) -> None:
        """Wait until no rank needs this worker, which runs no more steps.

        Args:
            goes_on: wait only until all ranks have left their loops.
            training: the training that ends here, if the script has another one after it.

        Raises `StateError` if a fault has taken the job back to a step before the end.
        """
        loop, worker = self._loop, self._loop.context.worker
        loop.stops()
        at = worker.step
        loop.recover_if_halted()
        while not (goes_on and worker.over) and not worker.waiting.finish(goes_on=goes_on, training=training):
            loop.recover()
            if loop.context.batches is None or worker.over:
                continue
            loop.agrees()  # newcomers compare their state before they leave the loop
            if worker.step < at:
                raise StateError(
                    f"the state went back to step {worker.step}, but the script left its loop after {at}",
                    hint="let `until` end the loop",
                )

    def end(self, training: FinishedTraining | None = None) -> None:
        """Wait as the script, or one of its trainings, is about to end: other ranks may still need this worker."""
        if self._ended or self._loop.left or self._loop.context.worker.leaves_others:
            return
        self.finish(training=training)
        self._ended = True
