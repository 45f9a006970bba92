"""State that DistributedDataParallel shares between ranks: buffers, and buckets of gradients.

DDP rebuilds its buckets after a process's first iteration, and their layout decides the order of summation. A newcomer
that still has the first layout would hang or corrupt the others, so every worker fixes the final layout before its
first real step.
"""

import gc
from collections.abc import Iterable, Mapping

from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from regrow.core.errors import UsageError


def replicas(objects: Iterable[object]) -> list[DistributedDataParallel]:
    """DDP wrappers in these objects, each once; also those inside other modules, and below `torch.compile`."""
    found: dict[int, DistributedDataParallel] = {}
    for item in objects:
        for module in item.modules() if isinstance(item, nn.Module) else ():
            if isinstance(module, DistributedDataParallel):
                found.setdefault(id(module), module)
    return list(found.values())


def made_elsewhere(
    objects: Iterable[object], known: Iterable[DistributedDataParallel]
) -> list[DistributedDataParallel]:
    """The DDP modules of this process that wrap parameters of these objects, except the known ones.

    `protect(net)` may have come before `DDP(net)`, and a trainer may wrap the model that it is given. The result is in
    the order of the parameters, which is the same in all workers.
    """
    places = {
        id(parameter): at
        for at, parameter in enumerate(
            parameter for item in objects if isinstance(item, nn.Module) for parameter in item.parameters()
        )
    }
    left_out = {id(module) for module in known}

    def others() -> list[tuple[int, DistributedDataParallel]]:
        # Check the type's own bases: `isinstance` may run code of objects that imitate others, `issubclass` is slow.
        living = (item for item in gc.get_objects() if DistributedDataParallel in type(item).__mro__)
        held = ((_first_place(module, places), module) for module in living if id(module) not in left_out)
        return [(place, module) for place, module in held if place is not None]

    if not places or not others():
        return []
    gc.collect()  # collect modules that the script has dropped
    return [module for _, module in sorted(others(), key=lambda found: found[0])]


def _first_place(module: DistributedDataParallel, places: Mapping[int, int]) -> int | None:
    return min((places[id(each)] for each in module.parameters() if id(each) in places), default=None)


def refuse_what_cannot_run_again(modules: Iterable[DistributedDataParallel]) -> None:
    """Raise `UsageError` for modules whose reducer cannot be reset after an aborted step."""
    for module in modules:
        if module.static_graph:
            raise UsageError(
                "DDP(static_graph=True) cannot run a step again: its reducer counts on the order of the first one",
                hint="leave static_graph out; find_unused_parameters=True is for parameters without gradients, and "
                "checkpoint(use_reentrant=False) for activation checkpointing",
            )


def reset_unfinished(modules: Iterable[DistributedDataParallel]) -> list[DistributedDataParallel]:
    """After an aborted step, prepare for the next one; returns the modules whose reducer had to be reset.

    A backward pass that ended inside DDP's own hooks leaves its reducer waiting for the rest, and the next forward
    would raise. A reset reducer rebuilds its buckets after one whole backward pass: call `settle_buckets` before the
    forwards that follow.
    """
    reset = []
    for module in modules:
        try:
            module.reducer._check_reducer_finalized()
        except RuntimeError:
            reset.append(module)
    return reset_all(reset)


def reset_all(modules: Iterable[DistributedDataParallel]) -> list[DistributedDataParallel]:
    """Reset modules whose forward may have made their reducer expect gradients that never came.

    Otherwise the reducer would reduce in the next backward, even if `synchronize` has switched reduction off.
    """
    reset = list(modules)
    for module in reset:
        module.reducer._reset_state()
    return reset


def settle_buckets(modules: Iterable[DistributedDataParallel]) -> list[DistributedDataParallel]:
    """After one whole backward pass, give the buckets their final layout now instead of in the next forward.

    Call it while collectives are answered locally: torch would synchronize the layout with all ranks, but the others
    have fixed theirs before. Returns modules that have had no whole backward pass yet, for a later call.
    """
    return [module for module in modules if not module.reducer._rebuild_buckets()]


def buckets(modules: Iterable[DistributedDataParallel]) -> str:
    """The layout of the buckets as text, for comparison between workers."""
    layouts = []
    for module in modules:
        if module.logger is not None:
            module.logger.set_runtime_stats_and_log()  # else the figures are those of the last sampled iteration
        data = module._get_ddp_logging_data()  # type: ignore[no-untyped-call]
        layouts.append(f"{data.get('rebuilt_bucket_sizes', '')}|{data.get('rebuilt_per_bucket_param_indices', '')}")
    return ";".join(layouts)


def take_over_buffers(modules: Iterable[DistributedDataParallel]) -> list[DistributedDataParallel]:
    """Synchronize buffers at the end of a step instead of in the forward; returns the modules that have buffers.

    DDP gives all ranks the buffers of rank 0 before each forward. Between two steps each rank then has running
    statistics of its own, and those of rank 0, which all ranks will get, would be lost with rank 0.
    """
    taken = [module for module in modules if module.broadcast_buffers and len(module.modules_buffers) > 0]
    for module in taken:
        module.broadcast_buffers = False
    return taken


def share_buffers(modules: Iterable[DistributedDataParallel]) -> None:
    """Give all ranks the buffers of rank 0. A collective; raises the errors of collectives."""
    for module in modules:
        module._sync_buffers()  # type: ignore[no-untyped-call]


def synchronize(modules: Iterable[DistributedDataParallel], on: bool) -> None:
    """Switch the reduction of gradients on or off for the next forwards and backwards, as `no_sync` does."""
    for module in modules:
        module.require_backward_grad_sync = on


def group_of(modules: Iterable[DistributedDataParallel]) -> ProcessGroup | None:
    """The group over which all modules reduce; None without modules.

    Raises:
        UsageError: they reduce over different groups.
    """
    groups = {id(module.process_group): module.process_group for module in modules}
    if len(groups) > 1:
        raise UsageError("the DDP modules reduce over different groups", hint="give them the same process_group")
    return next(iter(groups.values()), None)
