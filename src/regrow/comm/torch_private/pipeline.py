"""What an aborted step leaves behind in a pipeline's schedule, and how to clear it."""

import sys
from types import TracebackType

_SCHEDULES = "torch.distributed.pipelining.schedules"
_LEFT_OVERS = (
    "_internal_losses",
    "fwd_recv_ops",
    "bwd_recv_ops",
    "unshard_ops",
    "unsharded_stages",
    "backward_counter",
)
"""What `torch.distributed.pipelining` empties at the end of a schedule's step, and expects to be empty at its start."""


def reset_unfinished(error: BaseException) -> None:
    """After a step that this exception ended: empty the schedules that it went through.

    Schedules are not protected objects, so they are found where they were at work: in the exception's traceback. One
    that is not there had ended its step.
    """
    module = sys.modules.get(_SCHEDULES)
    if module is None:
        return
    traceback: TracebackType | None = error.__traceback__
    while traceback is not None:
        schedule = traceback.tb_frame.f_locals.get("self")
        if isinstance(schedule, module._PipelineSchedule):
            for name in _LEFT_OVERS:
                if hasattr(schedule, name):
                    getattr(schedule, name).clear()
        traceback = traceback.tb_next
