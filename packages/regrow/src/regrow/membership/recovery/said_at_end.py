"""Sentences about workers that should replace a rank, and ends that follow from them. Others are in `diagnosis.py`."""

from regrow.core.ids import Rank, StepNo, WorkerId
from regrow.core.messages.vocabulary import ErrorReport


def newcomer(rank: Rank) -> str:
    """A worker that has not been in the world yet."""
    return f"the worker that should replace rank {rank}"


def newcomers_fail(rank: Rank, times: int, error: ErrorReport | None) -> str:
    """No worker could be built for a lost rank."""
    text = f"{times} workers in a row that should replace rank {rank} have failed before they were ready"
    return text if error is None else f"{text}; the last:\n{error.traceback.rstrip()}"


def no_newcomers(reason: str) -> str:
    """Why a world does not grow while it trains."""
    return f"no worker can come into this training, as its state would differ: {reason}"


def not_started_again(reason: str, cause: str, step: StepNo) -> str:
    """A job that was asked to stop has lost its state."""
    return f"stopped at step {step}: {reason}; meanwhile {cause}, and the job is not started again"


def lost_after_loop(cause: str, steps: StepNo) -> str:
    """A node went in what the script does after its last step."""
    return f"{cause} in the code after the last step; {steps} steps had been committed"


def standbys_given_up(worker: WorkerId, error: tuple[ErrorReport, StepNo] | None) -> str:
    """Standbys that cannot be built are not tried for ever."""
    why = f": {error[0].type}: {error[0].message}" if error else ""
    return f"standbys die or do not fit before they are of use, the last was {worker}{why}; going on without"
