"""An end that was asked for, or that follows from a fault: the state goes to disk first, where there is a place."""

from regrow.core.exit_codes import RUN_AGAIN
from regrow.core.ids import Instant
from regrow.core.messages import facts
from regrow.membership import diagnosis as say
from regrow.membership.checkpoints import Checkpoints
from regrow.membership.job import Job
from regrow.membership.recovery.regroup import Regroup
from regrow.membership.roster import Stage
from regrow.membership.states import Forming, Mending, Retaining, Saving, Switching, Training, Waiting


class Stopping:
    """Ends a job, once its state is saved.

    Args:
        job: what ends.
        checkpoints: of the job.
        mender: saves the state of ranks that are halted since there is no room for them.
    """

    def __init__(self, job: Job, checkpoints: Checkpoints, mender: Regroup) -> None:
        self._job, self._checkpoints, self._mender = job, checkpoints, mender
        self.deadline: Instant | None = None
        """When the job ends, saved or not; None: nobody has asked for its end."""

    def requested(self, event: facts.StopRequested, now: Instant) -> None:
        """A signal or an operator asks for the end. Who asks again waits no longer than for the first one."""
        if self.deadline is not None and event.patience:
            return
        self._job.stopping = event.reason
        self.deadline = now + event.patience
        if isinstance(self._job.state, Training | Switching | Forming | Mending | Retaining | Waiting):
            self._checkpoints.save_before_end(self._job.step, event.patience, now)
        elif not isinstance(self._job.state, Saving):
            self.deadline = now

    def advance(self, now: Instant) -> None:
        """End the job, if it is time to; what halted ranks wait for is not waited for any more."""
        if self.deadline is not None:
            self._asked(self.deadline, now)
        if isinstance(self._job.state, Saving):
            self._saving(self._job.state, now)

    def _asked(self, deadline: Instant, now: Instant) -> None:
        job, text = self._job, say.stopped(self._job.stopping, self._job.step)
        if isinstance(job.state, Saving):
            if now >= deadline:
                job.end(job.state.code, job.state.diagnosis, now)
        elif now >= deadline or (self._checkpoints.saved_before_end and not self._may_have_more()):
            job.end(RUN_AGAIN, text, now)
        elif isinstance(job.state, Mending | Retaining) and self._halted_have_all():
            job.end_saved(RUN_AGAIN, text, now)  # nobody is brought back only to end
        elif isinstance(job.state, Waiting) and not job.state.saving:
            self._mender.overdue(job.state, now)

    def _may_have_more(self) -> bool:
        """Whether ranks that halt may stand further on than has been heard of them, and so than what is on disk."""
        if not isinstance(self._job.state, Mending | Retaining):
            return False
        step = self._checkpoints.savable()
        halting = self._job.roster.count(Stage.HALTING) > 0 and self._mender.can_save()
        return halting or (step is not None and self._checkpoints.is_news(step))

    def _halted_have_all(self) -> bool:
        """Whether survivors have the whole state as it is; else what is mended has more of it."""
        return not self._job.roster.count(Stage.HALTING) and self._checkpoints.savable() is not None

    def _saving(self, state: Saving, now: Instant) -> None:
        """The job is over: save what halted workers have, as far as they have all of it."""
        late = list(self._job.roster.seated(Stage.HALTING))
        if late and now < state.halt_by:
            return
        for worker in late:
            self._job.orders.fence(worker, "it has not stopped in time for the job's end", now, dump=True)
        self._checkpoints.forsake_dead(now)
        step = self._checkpoints.savable()
        if step is None or self._checkpoints.finished(step, now, halted=True):
            self._job.end(state.code, state.diagnosis, now)
