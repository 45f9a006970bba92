"""Messages about workers that should replace a rank, and about ends of the job. Others are in `diagnosis.py`."""

from collections.abc import Sequence

from regrow.core.ids import NodeId, Rank, Seconds, StepNo, WorkerId
from regrow.core.messages.vocabulary import ErrorReport


def newcomer(rank: Rank) -> str:
    """Name, for people, of a worker that has not been in the world yet."""
    return f"the worker that should replace rank {rank}"


def newcomers_fail(rank: Rank, times: int, error: ErrorReport | None) -> str:
    """Message that no worker could be built for a lost rank."""
    text = f"{times} workers in a row that should replace rank {rank} have failed before they were ready"
    return text if error is None else f"{text}; the last:\n{error.traceback.rstrip()}"


def no_newcomers(reason: str) -> str:
    """Message that the world does not grow while it trains."""
    return f"no worker can come into this training, as its state would differ: {reason}"


def not_started_again(reason: str, cause: str, step: StepNo) -> str:
    """Message about a fault in a job that was stopping and is therefore not restarted."""
    return f"stopped at step {step}: {reason}; meanwhile {cause}, and the job is not started again"


def lost_after_loop(cause: str, steps: StepNo) -> str:
    """Message that a node was lost in the script's code after its last step."""
    return f"{cause} in the code after the last step; {steps} steps had been committed"


def waits_for_room(lost: Sequence[NodeId], leaving: Sequence[NodeId], ranks: Sequence[Rank], deadline: Seconds) -> str:
    """Message that ranks wait for room. `lost`: their nodes that were lost; `leaving`: those that are given back."""
    which = f"rank {ranks[0]} waits" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} wait"
    why = [f"{' and '.join(lost)} {'was' if len(lost) == 1 else 'were'} lost"] if lost else []
    why += [f"{' and '.join(leaving)} {'is' if len(leaving) == 1 else 'are'} given back"] if leaving else []
    goal = f"{'it' if len(lost) == 1 else 'them'} to come back" if lost and not leaving else "room on other nodes"
    return f"{' and '.join(why) or 'no node has room'}; {which} for {goal}, for {deadline:g} s at most"


def standbys_given_up(worker: WorkerId, error: tuple[ErrorReport, StepNo] | None) -> str:
    """Message that no further standbys are started on a node, after several failures in a row."""
    why = f": {error[0].type}: {error[0].message}" if error else ""
    return f"standbys end or fail before they are ready, the last was {worker}{why}; going on without"


def breaks_devices(rank: Rank, step: StepNo, devices: Sequence[tuple[NodeId, int]], times: int) -> str:
    """Message that a script breaks the rank's devices on every node, or breaks the only device repeatedly."""
    names = " and ".join(f"{node}'s slot {slot}" for node, slot in devices)
    cure = "its error is above and in the rank's log; CUDA_LAUNCH_BLOCKING=1 shows the call"
    if len(devices) > 1:
        return f"the script breaks the devices of rank {rank} at step {step}: {names} have failed in turn; {cure}"
    return (
        f"the device of rank {rank} failed {times} times at step {step}, and there is no other ({names}): the script "
        f"breaks it, or it is broken; {cure}, and regrow doctor examines the device"
    )
