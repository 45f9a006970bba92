"""A process group of torch's own over NCCL, without a default group around it."""

from datetime import timedelta
from typing import Any

import torch

from regrow.comm.torch_private.internals import ProcessGroup, Store, Work, inner_group
from regrow.core.ids import Seconds


class Communicator:
    """NCCL's backend and the process group that runs its collectives."""

    def __init__(self, backend: Any, group: Any) -> None:
        self.backend, self.group = backend, group

    def start_coalescing(self, device: torch.device) -> None:
        """The calls that follow are one to NCCL."""
        self.group._start_coalescing(device)

    def end_coalescing(self, device: torch.device) -> Work:
        """The work of the calls since `start_coalescing`."""
        work: Work = self.group._end_coalescing(device)
        return work

    def set_timeout(self, seconds: Seconds) -> None:
        """How long a collective may take that begins from now on."""
        self.backend._set_default_timeout(timedelta(seconds=seconds))


def make_communicator(store: Store, rank: int, size: int, run_s: Seconds) -> Communicator:
    """NCCL's own; it talks to its peers at its first collective."""
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=run_s)
    backend = ProcessGroupNCCL(store, rank, size, options)
    group = inner_group(store, rank, size)
    group._register_backend(torch.device("cuda"), ProcessGroup.BackendType.NCCL, backend)
    group._set_default_backend(ProcessGroup.BackendType.NCCL)
    return Communicator(backend, group)
