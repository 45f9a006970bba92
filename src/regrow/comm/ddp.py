"""What all ranks must have alike in DistributedDataParallel: buffers, and which gradients are reduced together.

DDP lays its buckets out anew after a process's first iteration, and the layout decides the order of summation. A
newcomer that still has the first layout would hang or corrupt the others, so every worker settles it before its first
real step.
"""

from collections.abc import Iterable

from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from regrow.core.errors import UsageError


def replicas(objects: Iterable[object]) -> list[DistributedDataParallel]:
    """Those of these objects that DDP wraps."""
    return [item for item in objects if isinstance(item, DistributedDataParallel)]


def reset_unfinished(modules: Iterable[DistributedDataParallel]) -> list[DistributedDataParallel]:
    """After a step that was given up: make ready for the next one; returns whose reducer had to be reset.

    A backward pass that ended inside DDP's own hooks leaves its reducer waiting for the rest, and the next forward
    would raise. A reset reducer lays its buckets out anew after one whole backward pass: call `settle_buckets` before
    the forwards that follow.
    """
    reset = []
    for module in modules:
        try:
            module.reducer._check_reducer_finalized()
        except RuntimeError:
            reset.append(module)
    return reset_all(reset)


def reset_all(modules: Iterable[DistributedDataParallel]) -> list[DistributedDataParallel]:
    """The same for modules whose forward may have told their reducer to expect gradients, of which none came.

    The next backward would be taken for the one that is reduced, also where `synchronize` has switched that off.
    """
    reset = list(modules)
    for module in reset:
        module.reducer._reset_state()
    return reset


def settle_buckets(modules: Iterable[DistributedDataParallel]) -> list[DistributedDataParallel]:
    """After one whole backward pass: give the buckets their final layout now, not in the next forward.

    To be called where collectives are answered locally: torch would synchronize the layout with all ranks, of which the
    others settled theirs long ago. Returns those that have had no whole backward pass yet, to be settled later.
    """
    return [module for module in modules if not module.reducer._rebuild_buckets()]


def buckets(modules: Iterable[DistributedDataParallel]) -> str:
    """The layout as text, to be compared between workers."""
    layouts = []
    for module in modules:
        if module.logger is not None:
            module.logger.set_runtime_stats_and_log()  # else the figures are those of the last sampled iteration
        data = module._get_ddp_logging_data()  # type: ignore[no-untyped-call]
        layouts.append(f"{data.get('rebuilt_bucket_sizes', '')}|{data.get('rebuilt_per_bucket_param_indices', '')}")
    return ";".join(layouts)


def take_over_buffers(modules: Iterable[DistributedDataParallel]) -> list[DistributedDataParallel]:
    """Let buffers be synchronized at the end of a step instead of in the forward; returns the modules that have any.

    DDP gives all ranks the buffers of rank 0 before each forward. Between two steps each rank then has running
    statistics of its own, and those of rank 0, which count, would be lost with it.
    """
    taken = [module for module in modules if module.broadcast_buffers and len(module.modules_buffers) > 0]
    for module in taken:
        module.broadcast_buffers = False
    return taken


def share_buffers(modules: Iterable[DistributedDataParallel]) -> None:
    """Give all ranks the buffers of rank 0. A collective: raises what those raise."""
    for module in modules:
        module._sync_buffers()  # type: ignore[no-untyped-call]


def synchronize(modules: Iterable[DistributedDataParallel], on: bool) -> None:
    """Whether the forwards and backwards from here on reduce gradients: what `no_sync` sets for a while."""
    for module in modules:
        module.require_backward_grad_sync = on


def group_of(modules: Iterable[DistributedDataParallel]) -> ProcessGroup | None:
    """The group that all of them reduce over; None where there are none.

    Raises:
        UsageError: they reduce over different groups.
    """
    groups = {id(module.process_group): module.process_group for module in modules}
    if len(groups) > 1:
        raise UsageError("the DDP modules reduce over different groups", hint="give them the same process_group")
    return next(iter(groups.values()), None)
