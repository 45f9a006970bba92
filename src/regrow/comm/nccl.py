"""NCCL behind the same seam: aborted from another thread, then a new communicator.

Where CUDA is absent nothing here is used. Two transports serve a CUDA job: NCCL for CUDA tensors, the mesh
for CPU ones.
"""

import os
from datetime import timedelta
from typing import Any

import torch

from regrow.comm.private import ProcessGroup, Store, inner_group
from regrow.comm.transport import RUN_S, MeshTransport


def available() -> bool:
    """Whether this torch has NCCL and sees a GPU."""
    return torch.cuda.is_available() and torch.distributed.is_nccl_available()


class NcclTransport:
    """NCCL for CUDA tensors and the mesh for CPU tensors, as one transport."""

    def __init__(self, mesh: MeshTransport, store: Store, rank: int, size: int) -> None:
        self._mesh = mesh
        self._store, self._rank, self._size = store, rank, size
        self._backend: Any = None
        self._group: ProcessGroup | None = None

    def form(self, deadline: float) -> None:
        """Connect the mesh to all peers; NCCL connects with its first collective."""
        from torch.distributed import ProcessGroupNCCL

        # Errors must reach us instead of ending the process: regrow aborts and re-forms.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        self._mesh.form(deadline)
        options = ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=RUN_S)
        self._backend = ProcessGroupNCCL(self._store, self._rank, self._size, options)
        group = inner_group(self._store, self._rank, self._size)
        group._register_backend(torch.device("cuda"), ProcessGroup.BackendType.NCCL, self._backend)
        group._set_default_backend(ProcessGroup.BackendType.NCCL)
        self._group = group

    def call(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Run one method, by NCCL where its first tensor is on a GPU."""
        if self._group is not None and _on_cuda(args):
            return getattr(self._group, name)(*args, **options)
        return self._mesh.call(name, args, options)

    def broke(self) -> bool:
        """Whether a collective has failed so far."""
        return self._mesh.broke() or (self._backend is not None and self._backend.get_error().value != 0)

    def halt(self) -> None:
        """Abort the communicator and shut the mesh."""
        self._mesh.halt()
        if self._backend is not None:
            self._backend.abort()

    def close(self) -> None:
        """Let go of both."""
        self._group = self._backend = None
        self._mesh.close()


def _on_cuda(args: tuple[Any, ...]) -> bool:
    for arg in args:
        if isinstance(arg, torch.Tensor):
            return arg.is_cuda
        if isinstance(arg, list) and arg:
            return _on_cuda(tuple(arg))
    return False
