"""The one place where names that torch does not promise to keep are imported."""

from datetime import timedelta

import torch
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    BroadcastOptions,
    HashStore,
    PrefixStore,
    ProcessGroup,
    ProcessGroupGloo,
    ReduceScatterOptions,
    Store,
    Work,
    _create_work_from_future,
)
from torch.distributed.distributed_c10d import Backend
from torch.futures import Future

GLOO_THREADS = 2


def finished_work(result: object) -> Work:
    """A work handle that is done already, with `result` as its value."""
    future: Future[object] = Future()
    future.set_result(result)
    return _create_work_from_future(future)


def gloo_backend(store: Store, rank: int, size: int, host: str, connect: timedelta, run: timedelta) -> ProcessGroupGloo:
    """A gloo group that listens on `host` alone. `connect`: deadline to reach all peers, `run`: of one collective."""
    options = ProcessGroupGloo._Options()
    options._devices = [ProcessGroupGloo.create_device(hostname=host, lazy_init=False)]
    options._timeout = connect
    options._threads = GLOO_THREADS
    backend = ProcessGroupGloo(store, rank, size, options)
    backend.set_timeout(run)
    return backend


def inner_group(store: Store, rank: int, size: int) -> ProcessGroup:
    """An empty group to register real backends with."""
    return ProcessGroup(store, rank, size)


def register_gloo(group: ProcessGroup, backend: ProcessGroupGloo, devices: tuple[str, ...]) -> None:
    """Let gloo serve these device types in the group."""
    for device in devices:
        group._register_backend(torch.device(device), ProcessGroup.BackendType.GLOO, backend)
    group._set_default_backend(ProcessGroup.BackendType.GLOO)


__all__ = [
    "AllgatherOptions",
    "AllreduceOptions",
    "Backend",
    "BroadcastOptions",
    "HashStore",
    "PrefixStore",
    "ProcessGroup",
    "ProcessGroupGloo",
    "ReduceScatterOptions",
    "Store",
    "Work",
    "finished_work",
    "gloo_backend",
    "inner_group",
    "register_gloo",
]
