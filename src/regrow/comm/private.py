"""The one place where names that torch does not promise to keep are imported."""

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
from torch.distributed.distributed_c10d import Backend


def inner_group(store: Store, rank: int, size: int) -> ProcessGroup:
    """An empty group to register real backends with."""
    return ProcessGroup(store, rank, size)


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
    "inner_group",
]
