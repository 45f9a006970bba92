"""Recovery behind the loop: restartable functions and collectives are run again there too, until the script ends.

All ranks leave their loops together, once each has run the last step. From then on the loop is over for all of them: a
rank that is replaced receives the last state, skips the loop, and comes to the code behind it, where the others repeat
what they have run already. No rank ends its process, or destroys the group of all ranks, before all have come to that.
See decision 0057.
"""

from regrow.core.errors import StateError
from regrow.core.messages.trainings import FinishedTraining
from regrow.core.process.forks import at_exit, not_at_exit
from regrow.train.step_runner import StepRunner


class AfterLoop:
    """The time between the last step and the end of the script.

    Args:
        loop: that has been left.
    """

    def __init__(self, loop: StepRunner) -> None:
        self._loop = loop
        self._early = self._begun = self._ended = False

    @property
    def open(self) -> bool:
        """True while the script is behind its loop and a fault there is still repaired."""
        return self._begun and not self._ended

    def begin(self, *, early: bool = False) -> None:
        """The script has left its loop, as all ranks have, or will. `early`: some time ago, and not at the end."""
        worker, state = self._loop.context.worker, self._loop.context.protected()
        if self._begun:
            return
        if self._loop.context.batches is not None and not early:  # the script may have seeded generators meanwhile
            # A newcomer has not drawn what the last body drew. Under plain python or torchrun numbers are the same.
            self._loop.context.batches.seed_body(worker.step)
        if not worker.over:
            return
        self._begun = True
        self._loop.over()
        state.between.over(worker.step)
        state.variables.leave(over=True)
        worker.groups.on_leaving = self.end
        at_exit(self.end)

    def left_early(self, *, over: bool) -> None:
        """The script has left its loop before its end. It may be unwinding an error: the others are waited for later.

        That is where it meets them, and at its exit at the latest.

        Args:
            over: after a step that has happened, so that none follows.
        """
        self._early = over
        at_exit(self.finish)

    def meets_others(self) -> None:
        """The script calls what all ranks call. If it has left its loop before its end, they all have by now."""
        if self._early and not self._loop.context.worker.leaves_others:
            self._early = False
            not_at_exit(self.finish)
            self.finish(goes_on=True)
            self.begin(early=True)

    def passes_by(self) -> None:
        """This worker came in when all were behind the loop, and still has the rest of its last turn before it."""
        if self._loop.context.worker.over:
            self._loop.context.protected().between.passes_by(self._loop.context.worker.step)

    def recovered(self) -> None:
        """In a new generation. Who has still to leave its loop has nothing to run again there: all are behind it."""
        if self._loop.context.worker.over and not self._begun:
            self._loop.over()

    def finish(self, *, goes_on: bool = False, training: FinishedTraining | None = None) -> None:
        """No step can be run any more: wait until no rank needs this one.

        Args:
            goes_on: until all have left their loops alone.
            training: which ends here, where the script has another after it.

        Raises `StateError` where a fault has taken the job back to steps before the end.
        """
        loop, worker = self._loop, self._loop.context.worker
        loop.stops()
        at = worker.step
        loop.recover_if_halted()
        while not (goes_on and worker.over) and not worker.waiting.finish(goes_on=goes_on, training=training):
            loop.recover()
            if loop.context.batches is None or worker.over:
                continue
            loop.agrees()  # newcomers do so before they come here
            if worker.step < at:
                raise StateError(
                    f"the state went back to step {worker.step}, but the script left its loop after {at}",
                    hint="let `until` end the loop",
                )

    def end(self, training: FinishedTraining | None = None) -> None:
        """The script, or this training of several, is about to end: all others may still need this worker."""
        if self._ended or self._loop.left or self._loop.context.worker.leaves_others:
            return
        self.finish(training=training)
        self._ended = True
