"""Agreement on the durable checkpoint to resume from: the same one for all ranks, or none.

Each worker reads the newest checkpoint that it can read and reports those that it could not. If ranks have read
different ones, all are started again without those that some rank could not read, until all read the same one.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from regrow.core.exit_codes import SCRIPT_ERROR
from regrow.core.ids import NO_STATE, Instant, StepNo
from regrow.membership.job import Job
from regrow.membership.recovery.ladder import Ladder


@dataclass(frozen=True)
class AllAgree:
    """Result of `agree`: all ranks are at this step; 0: they start from the beginning."""

    step: StepNo


@dataclass(frozen=True)
class AllReadAgain:
    """Result of `agree`: all workers are to be started again, and read none of these checkpoints."""

    avoid: Mapping[StepNo, str]
    cause: str


@dataclass(frozen=True)
class NothingToRead:
    """Result of `agree`: no checkpoint is usable, and the job must not start from the beginning."""

    why: str


def agree(
    steps: Sequence[StepNo], refused: Mapping[StepNo, str], avoided: Collection[StepNo], *, needed: bool
) -> AllAgree | AllReadAgain | NothingToRead:
    """Decide, from the checkpoints that the ranks have read, whether all ranks can resume.

    Args:
        steps: by rank, the step that it has read; 0: it has found no checkpoint; `NO_STATE`: it could read none.
        refused: checkpoints that some rank could not read, with the reasons.
        avoided: checkpoints that no rank was to read this time.
        needed: True if the job must not start from the beginning.
    """
    low, high = min(steps), max(steps)
    if low == high and low != NO_STATE:
        return NothingToRead(_nothing(refused)) if needed and not low else AllAgree(low)
    new = {step: why for step, why in refused.items() if step not in avoided}
    if low == NO_STATE:
        if needed:
            return NothingToRead(_nothing(refused))
        return AllReadAgain(refused, "no checkpoint that is there can be read by all ranks")
    if low == 0:
        return NothingToRead(_not_shared(steps.index(low), steps.index(high), high))
    passed = {step: "not all ranks have found it" for step in steps if step > low and step not in new}
    return AllReadAgain({**refused, **passed}, f"not all ranks could read the checkpoint of step {high}")


class Resuming:
    """Makes all ranks resume from one checkpoint.

    Args:
        job: its workers have reported the steps that they have read.
        ladder: starts all workers again.
    """

    def __init__(self, job: Job, ladder: Ladder) -> None:
        self._job, self._ladder = job, ladder
        self._avoided: frozenset[StepNo] = frozenset()
        self._asked = job.resumes

    def agreed(self, now: Instant) -> bool:
        """True if all workers, now built, are at the same checkpoint. If not, orders a restart or ends the job."""
        job = self._job
        if not job.resumes or job.kept is not None:
            return True
        steps = [worker.state_at for worker in job.roster.placed()]
        for step in sorted(job.refused.keys() - self._avoided, reverse=True):
            job.orders.note(f"the checkpoint of step {step} is not used: {job.refused[step]}", now)
        needed = job.spec.must_resume or (job.step > 0 and bool(job.refused))
        match agree(steps, job.refused, self._avoided, needed=needed):
            case AllAgree(step):
                job.orders.note(_resumed(step, asked=self._asked and job.step == 0), now)
                return True
            case AllReadAgain(avoid, cause):
                job.refused.update(avoid)
                self._avoided = frozenset(job.refused)
                self._ladder.restart(cause, now)
            case NothingToRead(why):
                job.end(SCRIPT_ERROR, why, now)
        return False


def _resumed(step: StepNo, *, asked: bool) -> str:
    """Describe the start point of a training that should resume from a checkpoint. `asked`: `--resume` was given."""
    if step <= 0:
        if not asked:
            return "there is no complete checkpoint to go back to, so training starts from step 0 again"
        return (
            "--resume found no complete checkpoint in --checkpoint-dir, so training starts from step 0 "
            "(is that the folder of the job that is to go on?)"
        )
    return f"training goes on from the checkpoint of step {step}"


def _nothing(refused: Mapping[StepNo, str]) -> str:
    """Message that no durable checkpoint can be read, and the job must not start from the beginning."""
    if not refused:
        return "there is no complete checkpoint of this training in --checkpoint-dir, and --resume=must asks for one"
    listed = "; ".join(f"step {step}: {why}" for step, why in sorted(refused.items(), reverse=True))
    return f"none of the checkpoints in --checkpoint-dir can be read: {listed}"


def _not_shared(without: int, reader: int, step: StepNo) -> str:
    """Message that a rank finds no durable checkpoint in the folder where another rank has read one."""
    return (
        f"rank {without} finds no checkpoint where rank {reader} has read that of step {step}: with several nodes "
        "--checkpoint-dir must be a folder that all of them share"
    )
