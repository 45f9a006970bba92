"""End of the job, on request or after a fault: the state is saved to disk first if the job writes checkpoints."""

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
"""A process that remains for this long after the end of its script is reported."""
_LOOK_S: Seconds = 1.0
_RECEIVED_S: Seconds = 2.0
"""Time until all steps from before the request are known; agents report steps every 0.2 s."""


class Stopping:
    """Ends a job once its state is saved.

    Args:
        job: the job to end.
        checkpoints: its durable checkpoints.
        regroup: saves the state of ranks that are halted for lack of room.
    """

    def __init__(self, job: Job, checkpoints: Checkpoints, regroup: Regroup) -> None:
        self._job, self._checkpoints, self._regroup = job, checkpoints, regroup
        self._look_at: Instant = 0.0
        self._received_by: Instant | None = None
        self._reported = False
        """True once a note has named the processes that remain."""

    @property
    def deadline(self) -> Instant | None:
        """Time at which the job ends, whether its state is saved or not; None: no end was requested."""
        return self._job.stop_by

    @property
    def next_deadline(self) -> Instant | None:
        """Time at which the next `TimeAdvanced` is needed; None: at no time."""
        all_receive = isinstance(self._job.state, Training) and self._checkpoints.saved_before_end
        received_by = self._received_by if all_receive else None
        return min((at for at in (self.deadline, received_by) if at is not None), default=None)

    def recalled(self, now: Instant) -> None:
        """Continue a stop that a former coordinator was asked for, with the rest of its time."""
        if self._job.stop_by is not None:
            self._checkpoints.save_before_end(self._job.step, 0.0, now)

    def requested(self, event: facts.StopRequested, now: Instant) -> None:
        """Begin to stop, as a signal or an operator requests. A repeated request does not extend the time limit."""
        if self.deadline is not None and event.patience:
            return
        self._job.stopping = event.reason
        self._job.stop_by = now + event.patience
        state = self._job.state
        # During a restart from memory only the agents have the state; it can be saved once the ranks have it.
        rising = isinstance(state, Restarting | Building) and self._job.kept is not None
        if rising or isinstance(state, Training | Switching | Forming | Mending | Retaining | Waiting):
            self._checkpoints.save_before_end(self._job.step, event.patience, now)
            self._received_by = now + min(_RECEIVED_S, event.patience) if isinstance(state, Training) else None
        elif not isinstance(state, Saving | Closing | Releasing):
            self._job.stop_by = now

    def advance(self, now: Instant) -> None:
        """Continue a requested stop; end the job once its time is over or everything is saved."""
        if self.deadline is not None:
            self._asked(self.deadline, now)
        if isinstance(self._job.state, Saving):
            self._saving(self._job.state, now)
        elif isinstance(self._job.state, Closing | Releasing) and not self._reported and now >= self._look_at:
            self._look_at = now + _LOOK_S
            self._report_processes(now)

    def _report_processes(self, now: Instant) -> None:
        """Note a process that does not end although its script has, with the threads that keep it alive."""
        for worker in self._job.roster.placed():
            since, threads = self._job.returned.get(worker.worker, (now, []))
            if worker.living and worker.stage is not Stage.FINISHED and now >= since + _STAYS_S:
                self._reported = True
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
            # Nothing is left to save; the script's code after its loop has the remaining time.
            if now >= deadline:
                job.end(*((OK, "") if self._all_returned() else (RUN_AGAIN, text)), now)
        elif now < deadline and self._awaits_news(now):
            pass
        elif now >= deadline or (self._checkpoints.saved_before_end and not self._may_have_more()):
            job.end(RUN_AGAIN, text, now)
        elif isinstance(job.state, Mending | Retaining) and self._halted_have_all():
            job.end_saved(RUN_AGAIN, text, now)  # No worker is started only to be ended.
        elif isinstance(job.state, Waiting) and not job.state.saving:
            self._regroup.overdue(job.state, now)

    def _awaits_news(self, now: Instant) -> bool:
        """True if a step may be missing on disk that was not known when the stop was requested."""
        if self._received_by is None or not self._checkpoints.saved_before_end:
            return False
        if not isinstance(self._job.state, Training) or not self._checkpoints.may_be_behind:
            self._received_by = None
        elif self._checkpoints.is_news(self._job.step):
            self._received_by = None
            self._checkpoints.save_before_end(self._job.step, 0.0, now)
            return True
        elif now >= self._received_by:
            self._received_by = None
        return self._received_by is not None

    def _all_returned(self) -> bool:
        """True if every rank's script has ended normally, so that the training is complete."""
        return all(
            worker.worker in self._job.returned or (worker.stage is Stage.GONE and worker.exit_code == 0)
            for worker in self._job.roster.placed()
        )

    def _may_have_more(self) -> bool:
        """True if halting ranks may be at a later step than they have reported, and so than the step on disk."""
        if not isinstance(self._job.state, Mending | Retaining):
            return False
        step = self._checkpoints.savable()
        halting = self._job.roster.count(Stage.HALTING) > 0 and self._regroup.can_save()
        return halting or (step is not None and self._checkpoints.is_news(step))

    def _halted_have_all(self) -> bool:
        """True if halted survivors have the whole state; if not, the recovery may still restore the rest."""
        return not self._job.roster.count(Stage.HALTING) and self._checkpoints.savable() is not None

    def _saving(self, state: Saving, now: Instant) -> None:
        """Save the state of halted workers, if they have all of it, then end the job."""
        late = list(self._job.roster.placed(Stage.HALTING))
        if late and now < state.halt_by:
            return
        for worker in late:
            self._job.orders.fence(worker, "it has not stopped in time for the job's end", now, dump=True)
        self._checkpoints.forsake_dead(now)
        step = self._checkpoints.savable()
        if step is None or self._checkpoints.finished(step, now, halted=True):
            self._job.end(state.code, state.diagnosis, now)
