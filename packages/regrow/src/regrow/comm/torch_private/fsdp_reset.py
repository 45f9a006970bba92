"""Resets FSDP2 after an iteration that was cut off, for versions of torch without a function for it (2.11 and 2.12).

`FSDPModule.reset_iter_state` came with torch 2.13. It resets fields of FSDP's instances, and those two versions have
nearly the same fields. `lacking` names missing ones before the training begins.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

_OF_STATE = ("_training_state", "_modules_to_run_forward", "_device_handle", "_comm_ctx", "_state_ctx")
_OF_ITERATION = ("all_states", "iter_forward_root", "post_backward_final_callback_queued")
_EVENTS = ("_post_reduce_event", "_reshard_after_forward_event")
_UNDER_WAY = ("_all_gather_result", "_all_reduce_state", "_partial_reduce_output")
_OF_GROUP = (*_EVENTS, *_UNDER_WAY, "_post_forward_indices", "_training_state", "_to_sharded")


def by_torch() -> bool:
    """True if this torch can reset FSDP itself."""
    return hasattr(FSDPModule, "reset_iter_state")


def lacking(state: Any, groups: Iterable[Any]) -> list[str]:
    """The names that `reset` needs and that this module's state and parameter groups lack."""
    missing = [f"FSDPState.{name}" for name in _OF_STATE if not hasattr(state, name)]
    if not missing:
        missing += [f"FSDPStateContext.{name}" for name in _OF_ITERATION if not hasattr(state._state_ctx, name)]
    for group in groups:
        missing += [f"FSDPParamGroup.{name}" for name in _OF_GROUP if not hasattr(group, name)]
    return list(dict.fromkeys(missing))


def reset(state: Any, groups: Sequence[Any]) -> None:
    """End the iteration of a root that has had a forward; its unreduced gradients are lost.

    Args:
        state: FSDP's state of the root.
        groups: all parameter groups below the root; none of their gathers may have failed.
    """
    stream = state._device_handle.current_stream()
    for event in _awaited(state._comm_ctx, groups):
        stream.wait_event(event)  # the next all-gather waits for this stream
    _forget(state._comm_ctx)
    for each in state._state_ctx.all_states:
        each._modules_to_run_forward.clear()
        each._training_state = TrainingState.IDLE
    for group in groups:
        for name in (*_EVENTS, *_UNDER_WAY):
            setattr(group, name, None)
        group._post_forward_indices.clear()
        group._training_state = TrainingState.IDLE
        group._to_sharded()
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False


def _awaited(shared: Any, groups: Iterable[Any]) -> Iterator[Any]:
    """The events after which the memory of the iteration is free."""
    scattering = getattr(shared, "reduce_scatter_states", None) or [getattr(shared, "reduce_scatter_state", None)]
    found = [getattr(each, "event", None) for each in (shared.all_gather_state, *scattering)]
    found += getattr(shared, "_last_post_reduce_events", {}).values()
    for group in groups:
        gathering = group._all_gather_result
        if gathering is not None and gathering.all_gather_work is not None:
            gathering.all_gather_work.wait()
        found += [getattr(gathering, "all_gather_event", None), getattr(group._all_reduce_state, "event", None)]
        found += [getattr(group, name) for name in _EVENTS]
    yield from (event for event in found if event is not None)


def _forget(shared: Any) -> None:
    shared.all_gather_state = None
    if hasattr(shared, "reduce_scatter_state"):
        shared.reduce_scatter_state = None
    for name in ("reduce_scatter_states", "_last_post_reduce_events", "post_forward_order"):
        if hasattr(shared, name):
            getattr(shared, name).clear()
