"""NCCL behind the same seam: aborted from another thread, then a new communicator.

Where CUDA is absent nothing here is used. Two transports serve a CUDA job: NCCL for CUDA tensors, the mesh
for CPU ones.
"""

import os
from collections.abc import Callable
from typing import Any

import torch

from regrow.comm.flight import FLIGHT
from regrow.comm.torch_private.internals import Store, Work
from regrow.comm.torch_private.nccl_group import Communicator, make_communicator
from regrow.comm.transport import RUN_S, MeshTransport
from regrow.core.config import keeps_nccl_settings
from regrow.core.errors import CollectiveMisuse
from regrow.core.ids import Seconds

_OURS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # else its watchdog ends the process when a peer dies, or at our own abort
    "TORCH_NCCL_PROPAGATE_ERROR": "0",  # else it tells all ranks of an error by the store, and they end themselves
    "TORCH_NCCL_BLOCKING_WAIT": "0",  # else a wait raises by its own clock, and not when the generation is over
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # else a process whose abort takes long is ended
}
"""What would end this process where regrow aborts and re-forms; also where the environment said otherwise."""

_graveyard: list[object] = []
"""What was aborted. A group's destructor waits for its threads, and these for the interpreter where their store is of
Python: to drop the last reference under the interpreter's lock can hang."""


def available() -> bool:
    """Whether this torch has NCCL and sees a GPU."""
    return torch.cuda.is_available() and torch.distributed.is_nccl_available()


def settle_environment(keep: bool) -> None:
    """Set what torch reads when it makes NCCL's groups; `keep`: the user wants them as the environment has them."""
    if not keep:
        os.environ.update(_OURS)


Connect = Callable[[Store, int, int, Seconds], Communicator]
"""Makes the communicator of one rank: store, rank, ranks, and how long one collective may take."""


def connect(store: Store, rank: int, size: int, run_s: Seconds) -> Communicator:
    """NCCL's own; it talks to its peers at its first collective."""
    settle_environment(keeps_nccl_settings())
    return make_communicator(store, rank, size, run_s)


class NcclTransport:
    """NCCL for CUDA tensors and the mesh for CPU tensors, as one transport.

    Args:
        run_s: how long one collective may take, in seconds.
        connect: makes the communicator.
    """

    def __init__(
        self,
        mesh: MeshTransport,
        store: Store,
        rank: int,
        size: int,
        *,
        run_s: Seconds = RUN_S,
        connect: Connect = connect,
    ) -> None:
        self._mesh = mesh
        self._store, self._rank, self._size, self._run_s = store, rank, size, run_s
        self._connect = connect
        self._inner: Communicator | None = None

    def form(self, deadline: float) -> None:
        """Connect the mesh to all peers; NCCL connects with its first collective."""
        self._mesh.form(deadline)
        self._inner = self._connect(self._store, self._rank, self._size, self._run_s)

    def call(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Run one method, by NCCL where its first tensor is on a GPU."""
        if self._inner is not None and on_cuda(args):
            FLIGHT.lose_sight()
            return getattr(self._inner.group, name)(*args, **options)
        return self._mesh.call(name, args, options)

    def start_coalescing(self, device: torch.device) -> bool:
        """The calls that follow are one to NCCL, so that sends and receives among them cannot wait for each other."""
        if self._inner is None or device.type != "cuda":
            return False
        self._inner.start_coalescing(device)
        return True

    def end_coalescing(self, device: torch.device) -> Work | None:
        """The work of the calls since `start_coalescing`; None: the generation is over."""
        if self._inner is None:
            return None
        return self._inner.end_coalescing(device)

    def set_timeout(self, seconds: Seconds) -> None:
        """How long a collective may take that begins from now on."""
        self._run_s = seconds
        self._mesh.set_timeout(seconds)
        if self._inner is not None:
            self._inner.set_timeout(seconds)

    def broke(self) -> bool:
        """Whether a collective has failed so far."""
        return self._mesh.broke() or (self._inner is not None and self._inner.backend.get_error().value != 0)

    def misuse(self) -> CollectiveMisuse | None:
        """The first error of the script's own calls on the mesh; NCCL raises what it sees itself."""
        return self._mesh.misuse()

    def halt(self) -> None:
        """Abort the communicator and shut the mesh."""
        self._mesh.halt()
        if self._inner is not None:
            self._inner.backend.abort()

    def close(self) -> None:
        """Let go of both."""
        if self._inner is not None:
            _graveyard.append(self._inner)
            self._inner = None
        self._mesh.close()


def on_cuda(args: tuple[Any, ...]) -> bool:
    """Whether the first tensor of a call is on a GPU."""
    for arg in args:
        if isinstance(arg, torch.Tensor):
            return arg.is_cuda
        if isinstance(arg, list) and arg:
            return on_cuda(tuple(arg))
    return False
