"""Pipelines: state that an aborted step leaves in a schedule, and a stage's vote about shapes."""

import itertools
import sys
from types import TracebackType
from typing import Any, NoReturn

from regrow.core.errors import UsageError

_SCHEDULES = "torch.distributed.pipelining.schedules"
_LEFT_OVERS = (
    "_internal_losses",
    "fwd_recv_ops",
    "bwd_recv_ops",
    "unshard_ops",
    "unsharded_stages",
    "backward_counter",
    "_deferred_stages",
    "_finalized_stages",
)
"""Containers that `torch.distributed.pipelining` empties after a schedule's step, and expects empty at its start."""


def reset_unfinished(error: BaseException) -> None:
    """After a step that this exception ended, empty the schedules through which the exception passed.

    Schedules are not protected objects, so they are found in the exception's traceback, which shows the code that was
    running. A schedule that is not in the traceback had finished its step.
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
            for stage in getattr(schedule, "_stages", None) or [getattr(schedule, "_stage", None)]:
                _forget_receives(stage)
        traceback = traceback.tb_next


def _forget_receives(stage: Any) -> None:
    """Drop the receive buffers: from 2.15 on torch refuses every later step if a buffer is left.

    Receives that still write to a buffer belong to halted groups, and keep it alive.
    """
    for receives in ("args_recv_info", "grad_recv_info"):
        for info in itertools.chain(*(getattr(stage, receives, None) or {}).values()):
            if hasattr(info, "take_buffer"):
                info.buffer = None
    if hasattr(stage, "_gradient_reduction_handle"):
        stage._gradient_reduction_handle = None


def vote_on_shapes(stage: Any) -> int:
    """Vote as all other stages do, that no stage needs to ask for shapes. Raises `UsageError` if this one does."""
    from torch.distributed.pipelining._utils import InferenceMode

    if InferenceMode.needs_dynamic(stage._user_meta, stage.has_backward):
        refuse_to_ask(stage)
    return 1


def refuse_to_ask(stage: Any) -> NoReturn:
    """Raise `UsageError` for a stage that asks its neighbours for shapes."""
    raise UsageError(
        f"stage {stage.stage_index} of a pipeline would ask its neighbours for the shapes that it receives, and a "
        "newcomer builds without them",
        hint="give PipelineStage its input_args and output_args",
    )
