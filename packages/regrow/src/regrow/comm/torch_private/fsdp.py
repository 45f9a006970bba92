"""State that an aborted step leaves in FSDP2 modules (`fully_shard`, `replicate`), and functions that clear it.

FSDP keeps the state of an iteration: the modules whose parameters are gathered, pending gathers and reductions, and
hooks still to run. A step that is cut off leaves this state as it is.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from regrow.comm.torch_private import fsdp_reset
from regrow.comm.torch_private.internals import Work
from regrow.core.errors import RegrowError, UsageError

_FLAT = "FlatParameter"


def roots(objects: Iterable[object]) -> list[FSDPModule]:
    """The outermost FSDP modules in these objects, in the order in which they are found, each once.

    A model may have several: a pipeline stage without a wrapper of its own, or a model with only its blocks sharded.
    """
    found: dict[int, FSDPModule] = {}
    for item in objects:
        if isinstance(item, nn.Module):
            for root in _outermost(item):
                found.setdefault(id(root), root)
    return list(found.values())


def _outermost(module: nn.Module) -> Iterator[FSDPModule]:
    if isinstance(module, FSDPModule):
        yield module
        return
    for child in module.children():
        yield from _outermost(child)


def refuse_what_cannot_run_again(modules: Iterable[FSDPModule]) -> None:
    """Raise `UsageError` for modules that this torch cannot reset after an aborted step."""
    missing = [] if fsdp_reset.by_torch() else list(_lacking(modules))
    if missing:
        raise UsageError(
            f"FSDP2 of torch {torch.__version__} cannot run a step again: it has neither FSDPModule.reset_iter_state "
            f"nor {', '.join(missing)}",
            hint="install torch 2.13 or newer, or wrap the model in DistributedDataParallel",
        )


def refuse_first_form(objects: Iterable[object]) -> None:
    """Raise `UsageError` for modules under `FullyShardedDataParallel`, and for optimizers of its flat parameters."""
    for item in objects:
        modules = item.modules() if isinstance(item, nn.Module) else ()
        groups = item.param_groups if isinstance(item, torch.optim.Optimizer) else ()
        flat = any(type(each).__name__ == _FLAT for group in groups for each in group["params"])
        if flat or any(isinstance(module, FullyShardedDataParallel) for module in modules):
            raise UsageError(
                "a model is sharded by FullyShardedDataParallel, FSDP's first form, whose step cannot be run again "
                "after a fault",
                hint="shard by its second form, torch.distributed.fsdp.fully_shard: on each layer, then on the model",
            )


def _lacking(modules: Iterable[FSDPModule]) -> Iterator[str]:
    found: dict[str, None] = {}
    for root in modules:
        found |= dict.fromkeys(fsdp_reset.lacking(_state(root), parameter_groups([root])))
    yield from found


def reset_unfinished(modules: Iterable[FSDPModule]) -> None:
    """After an aborted step, prepare for the next one. Gradients of the aborted step are dropped.

    Call it when the generation is halted, before or after the next one is formed: it waits for pending work, which must
    have ended or failed. It may be called even if nothing is pending, and without any module.
    """
    for root in modules:
        state = _state(root)
        if state._is_root is None:
            continue  # it has had no forward yet, so torch has nothing to reset
        groups = list(groups_of(root))
        for group in groups:
            _settle(group)
        if fsdp_reset.by_torch():
            root.reset_iter_state()
        else:
            fsdp_reset.reset(state, groups)
        for group in groups:
            _drop_gradients(group)


def reshard(modules: Iterable[FSDPModule]) -> None:
    """Free every whole copy of parameters. Call it when the parameters' shards have been overwritten.

    A root keeps its whole parameters after a forward, and a script may keep others; these copies would be stale. Only
    for use between two steps; in the middle of a step, call `reset_unfinished` first.
    """
    for root in modules:
        for module in root.modules():  # type: ignore[attr-defined]
            if isinstance(module, FSDPModule):
                module.reshard()


def synchronize(modules: Iterable[FSDPModule], on: bool) -> None:
    """Switch reduction in the next backwards on or off; while it is off, whole gradients add up."""
    for root in modules:
        root.set_requires_gradient_sync(on)


def shard_size(modules: Iterable[FSDPModule]) -> int:
    """Number of ranks over which parameters are sharded, 1 without modules; these ranks share one replica's data.

    Raises:
        UsageError: the number is not the same for all modules.
    """
    sizes = {getattr(group.mesh_info, "shard_mesh_size", 1) for group in parameter_groups(modules)}
    if len(sizes) > 1:
        raise UsageError(
            f"parameters are sharded over {sorted(sizes)} ranks",
            hint="micro-batches need the same mesh for all modules",
        )
    return int(next(iter(sizes), 1))


def parameter_groups(modules: Iterable[FSDPModule]) -> Iterator[Any]:
    """FSDP's parameter groups below these roots; works also before the first forward."""
    for root in modules:
        for module in root.modules():  # type: ignore[attr-defined]
            if isinstance(module, FSDPModule):
                yield from _groups(_state(module))


_ACCUMULATED = "unsharded_accumulated_grad"


def _state(module: FSDPModule) -> Any:
    return module._get_fsdp_state()


def groups_of(root: FSDPModule) -> Iterator[Any]:
    """FSDP's parameter groups below a root that has had a forward."""
    for state in _state(root)._state_ctx.all_states:
        yield from _groups(state)


def _groups(state: Any) -> list[Any]:
    """The parameter groups of one module; at most one before torch 2.13."""
    found: list[Any] | None = getattr(state, "_fsdp_param_groups", None)
    if found is not None:
        return found
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def _settle(group: Any) -> None:
    """Drop a prefetched gather (`unshard(async_op=True)`) that has failed: it would make torch's reset raise."""
    gathering = group._all_gather_result
    work = gathering.all_gather_work if gathering is not None else None
    if isinstance(work, Work):
        try:
            work.wait()
        except (RuntimeError, RegrowError):
            group._all_gather_result = None


def _drop_gradients(group: Any) -> None:
    """Drop unreduced gradients, which the reset leaves at the whole parameters: the next step would add to them.

    Reduced gradients are at the sharded parameters, as after any other aborted step.
    """
    for parameter in group.fsdp_params:
        if hasattr(parameter, "_unsharded_param"):
            parameter._unsharded_param.grad = None
        if _ACCUMULATED in vars(parameter):  # from torch 2.15 on, another name of the gradient above
            setattr(parameter, _ACCUMULATED, None)
