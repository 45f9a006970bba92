"""Several trainings of a script, in sequence, each with its own workers. See decision 0105.

When all ranks have finished a training, they are released and end. Then all workers are started as at first, with
the list of finished trainings. The job's steps are counted across trainings.
"""

from regrow.core.ids import Instant, StepNo
from regrow.core.job import JobSpec
from regrow.core.messages.copies import ForgetCopies
from regrow.core.messages.trainings import FinishedTraining, TrainingPlace
from regrow.membership.orders import Orders
from regrow.membership.roster import Roster, Stage
from regrow.membership.states import Restarting


class FinishedTrainings:
    """The trainings of a job: the finished ones and the present one."""

    def __init__(self, spec: JobSpec, roster: Roster, orders: Orders) -> None:
        self._spec, self._roster, self._orders = spec, roster, orders
        self.finished: list[FinishedTraining] = []

    @property
    def began(self) -> StepNo:
        """The step of the job that is step 0 of the present training."""
        return TrainingPlace(self.finished).began

    @property
    def present(self) -> str:
        """Name of the present training; empty: the script has only one."""
        return next((worker.training for worker in self._roster.placed() if worker.training), "")

    def ended(self) -> FinishedTraining | None:
        """The training that the workers report as finished, if another follows it in the script; else None."""
        reported = sorted(self._roster.placed(Stage.FINISHED), key=lambda worker: worker.rank or 0)
        return next((worker.ended for worker in reported if worker.ended is not None), None)

    def turn(self, ended: FinishedTraining, now: Instant) -> Restarting:
        """End all workers after they have finished a training; the next one begins when they are gone."""
        if all(each.name != ended.name for each in self.finished):  # A former coordinator may have entered it.
            steps = ended.until - self.began
            self._orders.note(f"the training {ended.name} is finished, after {steps} steps", now)
            self.finished.append(ended)
        for stage in (Stage.FINISHED, Stage.MEMBER):
            self._orders.release(stage, now)
        for node in self._roster.living_nodes():
            self._orders.add(ForgetCopies(node.node))
        for worker in list(self._roster.workers.values()):
            if worker.living and worker.stage is not Stage.RELEASED:
                self._orders.fence(worker, "it was built for a training that is finished", now)
        return Restarting(now + self._spec.halt_deadline, leave_by=now + self._spec.build_deadline)

    def late(self, state: Restarting, now: Instant) -> Restarting | None:
        """Release again, or fence, remaining workers of a finished training. None: no training has just finished."""
        if state.leave_by is None:
            return None
        self._orders.release(Stage.RELEASED, now)
        for worker in list(self._roster.workers.values() if now >= state.leave_by else ()):
            if worker.living:
                self._orders.fence(worker, "its training is finished, and its process has not ended", now)
        return Restarting(now + self._spec.halt_deadline, state.leave_by if now < state.leave_by else None)


def turning(state: object) -> bool:
    """True if a training is finished and its workers were released, so that the next one is to begin."""
    return isinstance(state, Restarting) and state.leave_by is not None
