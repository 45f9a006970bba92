"""An end that was asked for, or that follows from a fault: the state goes to disk first, where there is a place."""

from regrow.core.exit_codes import OK, RUN_AGAIN
from regrow.core.ids import Instant, Seconds
from regrow.core.messages import facts
from regrow.membership import diagnosis as say
from regrow.membership.checkpoints import Checkpoints
from regrow.membership.job import Job
from regrow.membership.recovery.regroup import Regroup
from regrow.membership.roster import Stage
from regrow.membership.states import (
    Building,
    Closing,
    Forming,
    Mending,
    Releasing,
    Restarting,
    Retaining,
    Saving,
    Switching,
    Training,
    Waiting,
)

_STAYS_S: Seconds = 60.0
"""A process that is still there so long after its script's last line is told of."""
_LOOK_S: Seconds = 1.0


class Stopping:
    """Ends a job, once its state is saved.

    Args:
        job: what ends.
        checkpoints: of the job.
        mender: saves the state of ranks that are halted since there is no room for them.
    """

    def __init__(self, job: Job, checkpoints: Checkpoints, mender: Regroup) -> None:
        self._job, self._checkpoints, self._mender = job, checkpoints, mender
        self._look_at: Instant = 0.0
        self._told = False
        """Whether processes that stay were told of."""

    @property
    def deadline(self) -> Instant | None:
        """When the job ends, saved or not; None: nobody has asked for its end."""
        return self._job.stop_by

    def recalled(self, now: Instant) -> None:
        """Another coordinator was asked for the end: this one has what is left of the time."""
        if self._job.stop_by is not None:
            self._checkpoints.save_before_end(self._job.step, 0.0, now)

    def requested(self, event: facts.StopRequested, now: Instant) -> None:
        """A signal or an operator asks for the end. Who asks again waits no longer than for the first one."""
        if self.deadline is not None and event.patience:
            return
        self._job.stopping = event.reason
        self._job.stop_by = now + event.patience
        state = self._job.state
        # Where all start again from memory, the state is in the agents': it reaches the disk when the ranks have it.
        rising = isinstance(state, Restarting | Building) and self._job.kept is not None
        if rising or isinstance(state, Training | Switching | Forming | Mending | Retaining | Waiting):
            self._checkpoints.save_before_end(self._job.step, event.patience, now)
        elif not isinstance(state, Saving | Closing | Releasing):
            self._job.stop_by = now

    def advance(self, now: Instant) -> None:
        """End the job, if it is time to; what halted ranks wait for is not waited for any more."""
        if self.deadline is not None:
            self._asked(self.deadline, now)
        if isinstance(self._job.state, Saving):
            self._saving(self._job.state, now)
        elif isinstance(self._job.state, Closing | Releasing) and not self._told and now >= self._look_at:
            self._look_at = now + _LOOK_S
            self._tell_of_processes(now)

    def _tell_of_processes(self, now: Instant) -> None:
        """All steps are done, and a process does not end: people see whose it is, and what keeps it."""
        for worker in self._job.roster.seated():
            since, threads = self._job.returned.get(worker.worker, (now, []))
            if worker.living and worker.stage is not Stage.FINISHED and now >= since + _STAYS_S:
                self._told = True
                kept = "by threads that are no daemons: " + ", ".join(threads[:8]) if threads else "at its exit"
                text = (
                    f"rank {worker.rank} has done its script's last line {_STAYS_S:.0f} s ago, and its process is "
                    f"still there, kept {kept}"
                )
                self._job.orders.note(text, now, worker)
                return

    def _asked(self, deadline: Instant, now: Instant) -> None:
        job, text = self._job, say.stopped(self._job.stopping, self._job.step)
        if isinstance(job.state, Saving):
            if now >= deadline:
                job.end(job.state.code, job.state.diagnosis, now)
        elif isinstance(job.state, Closing | Releasing):
            # Nothing is left to be saved: what the script does behind its loop has the time that there is.
            if now >= deadline:
                job.end(*((OK, "") if self._all_returned() else (RUN_AGAIN, text)), now)
        elif now >= deadline or (self._checkpoints.saved_before_end and not self._may_have_more()):
            job.end(RUN_AGAIN, text, now)
        elif isinstance(job.state, Mending | Retaining) and self._halted_have_all():
            job.end_saved(RUN_AGAIN, text, now)  # nobody is brought back only to end
        elif isinstance(job.state, Waiting) and not job.state.saving:
            self._mender.overdue(job.state, now)

    def _all_returned(self) -> bool:
        """Whether every rank's script has done its last line, so that what ends is a training that is done."""
        return all(
            worker.worker in self._job.returned or (worker.stage is Stage.GONE and worker.exit_code == 0)
            for worker in self._job.roster.seated()
        )

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
