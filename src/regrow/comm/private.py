"""The one place where names that torch does not promise to keep are imported."""

from typing import Any

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
from torch.distributed.constants import default_pg_timeout
from torch.distributed.distributed_c10d import Backend, _world
from torch.distributed.rendezvous import _rendezvous_handlers as rendezvous_handlers


def inner_group(store: Store, rank: int, size: int) -> ProcessGroup:
    """An empty group to register real backends with."""
    return ProcessGroup(store, rank, size)


def calls_being_coalesced() -> dict[Any, Any]:
    """For each group inside torch's coalescing manager, what was collected so far."""
    collected: dict[Any, Any] = _world.pg_coalesce_state
    return collected


def name_ranks(group: ProcessGroup, ranks: list[int]) -> None:
    """Tell torch which ranks of the world a group has, after these have changed."""
    known = _world.pg_group_ranks.get(group)
    if known is not None:
        known.clear()
        known.update({rank: place for place, rank in enumerate(ranks)})


__all__ = [
    "AllgatherOptions",
    "AllreduceOptions",
    "Backend",
    "BroadcastOptions",
    "HashStore",
    "PrefixStore",
    "ProcessGroup",
    "ReduceScatterOptions",
    "Store",
    "Work",
    "default_pg_timeout",
    "inner_group",
    "name_ranks",
    "rendezvous_handlers",
]
