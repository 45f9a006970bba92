"""The one place where names that torch does not promise to keep are imported."""

import functools
import sys
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    BroadcastOptions,
    HashStore,
    PrefixStore,
    ProcessGroup,
    ReduceScatterOptions,
    Store,
    Work,
)
from torch._C._distributed_c10d import _DistributedBackendOptions as DistributedBackendOptions
from torch._C._dynamo import eval_frame
from torch.distributed.constants import default_pg_timeout
from torch.distributed.distributed_c10d import Backend, _world
from torch.distributed.rendezvous import _rendezvous_handlers as rendezvous_handlers
from torch.multiprocessing.reductions import StorageWeakRef


def compiled() -> float:
    """Seconds that torch has spent on compiling here; 0 if nothing was compiled, or this torch does not report it."""
    module = sys.modules.get("torch._dynamo.utils")
    return float(sum(getattr(module, "compilation_time_metrics", {}).get("_compile.compile_inner", ())))


def compiled_module(module: object) -> object | None:
    """The module inside a wrapper made by `torch.compile`; None if the module is no such wrapper."""
    return getattr(module, "_orig_mod", None)


def schedulers_in(scheduler: object) -> Iterable[object]:
    """The schedulers inside a scheduler that combines several, such as `SequentialLR`."""
    found: Iterable[object] = getattr(scheduler, "_schedulers", ())
    return found


def can_be_watched(optimizer: torch.optim.Optimizer) -> bool:
    """True if hooks on the optimizer work; False for one that wraps another without being one itself (as in Opacus)."""
    return hasattr(optimizer, "_optimizer_step_pre_hooks")


def inner_group(store: Store, rank: int, size: int) -> ProcessGroup:
    """An empty group in which real backends can be registered."""
    return ProcessGroup(store, rank, size)


def calls_being_coalesced() -> dict[Any, Any]:
    """For each group in torch's coalescing manager, the calls collected so far."""
    collected: dict[Any, Any] = _world.pg_coalesce_state
    return collected


def name_ranks(group: ProcessGroup, ranks: list[int]) -> None:
    """Update torch's record of the group's ranks in the world, after these ranks have changed."""
    known = _world.pg_group_ranks.get(group)
    if known is not None:
        known.clear()
        known.update({rank: place for place, rank in enumerate(ranks)})


def coalesced(group: ProcessGroup, device: torch.device, operations: list[dist.P2POp]) -> list[Work]:
    """Issue a batch of sends and receives inside torch's coalescing manager, as torch does for its own groups."""
    with c10d._coalescing_manager(group, device, async_ops=True) as manager:
        for each in operations:
            to = "group_dst" if each.op is dist.isend else "group_src"
            each.op(each.tensor, group=each.group, tag=each.tag, **{to: each.group_peer})
    works: list[Work] = manager.works
    return works


def objects_of(tensor: torch.Tensor, sizes: list[int]) -> list[Any]:
    """The objects whose pickles a tensor contains one after another, decoded as torch decodes them on receipt."""
    found, at = list[Any](), 0
    for size in sizes:
        found.append(c10d._tensor_to_object(tensor[at : at + size], size, None))  # type: ignore[no-untyped-call]
        at += size
    return found


def storage_name(tensor: torch.Tensor) -> object:
    """A value that is equal for tensors in the same memory, which is not reused while the value exists."""
    return _StorageName(StorageWeakRef(tensor.untyped_storage()))  # type: ignore[no-untyped-call]


class _StorageName:
    def __init__(self, reference: StorageWeakRef) -> None:
        self._reference = reference

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _StorageName) and bool(self._reference.cdata == other._reference.cdata)

    def __hash__(self) -> int:
        return hash(self._reference.cdata)


def serve_by(
    kind: type[ProcessGroup],
    *,
    set_timeout: Callable[[Any, timedelta], None],
    send_together: Callable[[list[dist.P2POp]], list[Work] | None],
) -> None:
    """Have torch accept groups of this kind where it checks for its own by their exact type.

    Args:
        set_timeout: for `_set_pg_timeout`, which would otherwise only warn.
        send_together: for `batch_isend_irecv`, which otherwise makes separate calls, as it does if this returns None.
    """
    by_itself, one_by_one = c10d._set_pg_timeout, c10d.batch_isend_irecv

    @functools.wraps(by_itself)
    def set_pg_timeout(timeout: timedelta, group: ProcessGroup | None = None) -> None:
        found = dist.group.WORLD if group is None else group
        if isinstance(found, kind):
            set_timeout(found, timeout)
        else:
            by_itself(timeout, group)

    @functools.wraps(one_by_one)
    def batch_isend_irecv(p2p_op_list: list[dist.P2POp]) -> list[Work]:
        together = send_together(p2p_op_list) if p2p_op_list else None
        found: list[Work] = one_by_one(p2p_op_list) if together is None else together
        return found

    recorded = getattr(c10d, "_maybe_attach_flight_recorder", None)  # from torch 2.15 on

    def attach_flight_recorder(group: ProcessGroup, *args: Any) -> None:
        # It reads the group's name in C++, which has names only of groups with backends of torch's own.
        if recorded is not None and not isinstance(group, kind):
            recorded(group, *args)

    if recorded is not None:
        vars(c10d)["_maybe_attach_flight_recorder"] = attach_flight_recorder
    c10d._set_pg_timeout = set_pg_timeout
    c10d.batch_isend_irecv = dist.batch_isend_irecv = batch_isend_irecv


def keep_from_compiler(*functions: Callable[..., Any]) -> None:
    """Have torch's compiler run these functions, and all that they call, uncompiled, when it meets them in a frame.

    Does not import the compiler, which takes seconds.
    """
    as_it_is = eval_frame._FrameAction.SKIP
    for function in functions:
        eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(as_it_is, as_it_is))
        vars(function).update(_torchdynamo_disable=True, _torchdynamo_disable_msg="regrow's own")  # for inlined calls


__all__ = [
    "AllgatherOptions",
    "AllreduceOptions",
    "Backend",
    "BroadcastOptions",
    "DistributedBackendOptions",
    "HashStore",
    "PrefixStore",
    "ProcessGroup",
    "ReduceScatterOptions",
    "Store",
    "Work",
    "coalesced",
    "default_pg_timeout",
    "inner_group",
    "keep_from_compiler",
    "name_ranks",
    "rendezvous_handlers",
    "serve_by",
]
