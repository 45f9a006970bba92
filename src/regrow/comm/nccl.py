"""NCCL behind the same seam as gloo: aborted from another thread, then a new communicator.

Where CUDA is absent nothing here is used. Two transports serve a CUDA job: NCCL for CUDA tensors, gloo for CPU ones.
"""

import os
from datetime import timedelta
from typing import Any

import torch

from regrow.comm.private import ProcessGroup, Store, inner_group
from regrow.comm.transport import RUN, GlooTransport


def available() -> bool:
    """Whether this torch has NCCL and sees a GPU."""
    return torch.cuda.is_available() and torch.distributed.is_nccl_available()


class NcclTransport:
    """NCCL for CUDA tensors and gloo for CPU tensors, as one transport."""

    def __init__(self, gloo: GlooTransport, store: Store, rank: int, size: int) -> None:
        self._gloo = gloo
        self._store, self._rank, self._size = store, rank, size
        self._backend: Any = None
        self._group: ProcessGroup | None = None

    def form(self, deadline: float) -> None:
        from torch.distributed import ProcessGroupNCCL

        # Errors must reach us instead of ending the process: regrow aborts and re-forms.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        self._gloo.form(deadline)
        options = ProcessGroupNCCL.Options()
        options._timeout = max(RUN, timedelta(seconds=deadline))
        self._backend = ProcessGroupNCCL(self._store, self._rank, self._size, options)
        group = inner_group(self._store, self._rank, self._size)
        group._register_backend(torch.device("cuda"), ProcessGroup.BackendType.NCCL, self._backend)
        group._set_default_backend(ProcessGroup.BackendType.NCCL)
        self._group = group

    def call(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if self._group is not None and _on_cuda(args):
            return getattr(self._group, name)(*args, **options)
        return self._gloo.call(name, args, options)

    def broke(self) -> bool:
        """Whether a collective has failed so far."""
        return self._gloo.broke() or (self._backend is not None and self._backend.get_error().value != 0)

    def halt(self) -> None:
        self._gloo.halt()
        if self._backend is not None:
            self._backend.abort()

    def bury(self) -> bool:
        self._group = self._backend = None
        return self._gloo.bury()


def _on_cuda(args: tuple[Any, ...]) -> bool:
    for arg in args:
        if isinstance(arg, torch.Tensor):
            return arg.is_cuda
        if isinstance(arg, list) and arg:
            return _on_cuda(tuple(arg))
    return False
