"""An end that was asked for: the state goes to disk first, where checkpoints are written and there is time for one."""

from regrow.core.exit_codes import RUN_AGAIN
from regrow.core.ids import Instant
from regrow.core.messages import facts
from regrow.membership import diagnosis as say
from regrow.membership.checkpoints import Checkpoints
from regrow.membership.job import Job
from regrow.membership.recovery.regroup import Regroup
from regrow.membership.states import Forming, Mending, Switching, Training, Waiting


class Stopping:
    """Ends a job on request, once its state is saved.

    Args:
        job: what ends.
        checkpoints: of the job.
        mender: saves the state of ranks that are halted since there is no room for them.
    """

    def __init__(self, job: Job, checkpoints: Checkpoints, mender: Regroup) -> None:
        self._job, self._checkpoints, self._mender = job, checkpoints, mender
        self._reason = ""
        self.deadline: Instant | None = None
        """When the job ends, saved or not; None: nobody has asked for its end."""

    def requested(self, event: facts.StopRequested, now: Instant) -> None:
        """A signal or an operator asks for the end. Who asks again waits no longer than for the first one."""
        if self.deadline is not None and event.patience:
            return
        self._reason = event.reason
        self.deadline = now + event.patience
        if isinstance(self._job.state, Training | Switching | Forming | Mending | Waiting):
            self._checkpoints.save_before_end(self._job.step, event.patience, now)
        else:
            self.deadline = now

    def advance(self, now: Instant) -> None:
        """End the job, if it is time to; what halted ranks wait for is not waited for any more."""
        if self.deadline is None:
            return
        if now >= self.deadline or self._checkpoints.saved_before_end:
            self._job.end(RUN_AGAIN, say.stopped(self._reason, self._job.step), now)
        elif isinstance(self._job.state, Waiting) and not self._job.state.saving:
            self._mender.overdue(self._job.state, now)
