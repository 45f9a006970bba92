"""NCCL behind the same seam: aborted from another thread, then a new communicator.

Where CUDA is absent nothing here is used. Two transports serve a CUDA job: NCCL for CUDA tensors, the mesh
for CPU ones.
"""

import ctypes
import os
import threading
from collections.abc import Callable
from typing import Any

import torch

from regrow.comm.flight import FLIGHT
from regrow.comm.torch_private.internals import Store, Work
from regrow.comm.torch_private.nccl_group import Communicator, make_communicator
from regrow.comm.transport import RUN_S, MeshTransport
from regrow.core.config import keeps_nccl_settings
from regrow.core.errors import CollectiveMisuse, DeadlineExceeded, StateError
from regrow.core.ids import Seconds
from regrow.core.process.forks import at_exit
from regrow.devices import accelerators, nvidia

_OURS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # else its watchdog ends the process when a peer dies, or at our own abort
    "TORCH_NCCL_PROPAGATE_ERROR": "0",  # else it tells all ranks of an error by the store, and they end themselves
    "TORCH_NCCL_BLOCKING_WAIT": "0",  # else a wait raises by its own clock, and not when the generation is over
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # else a process whose abort takes long is ended
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",  # else a thread asks the store each second, also of a generation that is over
}
"""What would end this process where regrow aborts and re-forms; also where the environment said otherwise."""

LEAVE_S: Seconds = 10.0
"""How long the end of a process waits for what it has enqueued."""
ABORT_S: Seconds = 60.0
"""How long an abort may take until the device has given up what it ran."""
_MEETING = 0x6E63636C
"""The tag of the messages by which two ranks meet."""
_ALL = -1
_living: list[Communicator] = []


def available() -> bool:
    """Whether this torch has NCCL and sees a GPU."""
    return nvidia.nccl_available()


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


def _stays(inner: Communicator) -> None:
    """Never destroy it: its destructor waits for its threads, and these for the interpreter, as the store is Python's.

    To drop the last reference under the interpreter's lock can hang, and at the interpreter's end crash.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(inner))


def _leave() -> None:
    """The process ends: its communicators end while there is an interpreter, as their threads may ask the store.

    What is enqueued is waited for first: peers may need it.
    """
    if not _living:
        return
    drained = threading.Thread(target=_drain, daemon=True)
    drained.start()
    drained.join(LEAVE_S)
    for inner in _living:
        inner.begin_abort()
    while _living:
        _living.pop().await_abort(LEAVE_S)
    drained.join(LEAVE_S)


def _drain() -> None:
    if accelerators.in_use() is not None:
        torch.accelerator.synchronize()


at_exit(_leave)


class NcclTransport:
    """NCCL for CUDA tensors and the mesh for CPU tensors, as one transport.

    Before their first call of NCCL ranks meet on the mesh: NCCL waits for ever, and cannot be aborted, where one that
    it shall connect to has died before.

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
        self._met: set[int] = set()
        self._coalescing: torch.device | None = None

    def form(self, deadline: float) -> None:
        """Connect the mesh to all peers; NCCL connects with its first collective."""
        self._mesh.form(deadline)
        self._inner = self._connect(self._store, self._rank, self._size, self._run_s)
        _stays(self._inner)
        _living.append(self._inner)

    def call(
        self, name: str, args: tuple[Any, ...], options: dict[str, Any], done: Callable[[], None] | None = None
    ) -> Any:
        """Run one method, by NCCL where its first tensor is on a GPU; of a call put together with others none is done.

        `done` is called when the answer is there for what is enqueued next.
        """
        if self._inner is not None and on_cuda(args):
            if self._coalescing is not None:
                return getattr(self._inner.group, name)(*args, **options)
            self._meet(int(args[1]) if name in ("send", "recv") else _ALL)
            FLIGHT.lose_sight()
            with self._inner.calling():
                work = getattr(self._inner.group, name)(*args, **options)
            if done is not None:
                work.wait()
                done()
            return work
        return self._mesh.call(name, args, options, done)

    def _meet(self, peer: int) -> None:
        """Return when that rank, or all of the group, come to their first call too. Raises what collectives do."""
        if peer in self._met or peer == self._rank:
            return
        if peer == _ALL:
            self._mesh.call("barrier", (), {}).wait()
        else:
            mine, other = torch.zeros(1, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
            works = [self._mesh.call("send", ([mine], peer, _MEETING), {})]
            works.append(self._mesh.call("recv", ([other], peer, _MEETING), {}))
            for work in works:
                work.wait()
        self._met.add(peer)

    def start_coalescing(self, device: torch.device) -> bool:
        """The calls that follow are one to NCCL, so that sends and receives among them cannot wait for each other."""
        if self._inner is None or not nvidia.is_one(device):
            return False
        self._meet(_ALL)
        FLIGHT.lose_sight()
        self._inner.start_coalescing(device)
        self._coalescing = device
        return True

    def end_coalescing(self, device: torch.device) -> Work | None:
        """The work of the calls since `start_coalescing`; None: the generation is over."""
        self._coalescing = None
        if self._inner is None:
            return None
        return self._inner.end_coalescing(device)

    def give_up_coalescing(self) -> None:
        """Close what `start_coalescing` has opened: NCCL keeps it open for the thread, and would add its next calls.

        Raises `StateError` where NCCL refuses: torch then counts this thread as inside for ever.
        """
        device = self._coalescing
        if device is None:
            return
        try:
            self.end_coalescing(device)
        except RuntimeError as error:
            raise StateError(
                f"a batch of NCCL calls that was given up could not be closed: {error}",
                hint="this process cannot use NCCL any more; another takes its place",
            ) from error

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
        """Shut the mesh, and let the communicator be aborted."""
        self._mesh.halt()
        if self._inner is not None:
            self._inner.begin_abort()

    def close(self) -> None:
        """Let go of both. Raises `DeadlineExceeded` where the device does not give up what it runs."""
        inner, self._inner = self._inner, None
        self._mesh.close()
        if inner is None:
            return
        if inner in _living:
            _living.remove(inner)
        if not inner.await_abort(ABORT_S):
            raise DeadlineExceeded(
                f"NCCL's abort did not end within {ABORT_S:.0f} s: the device still runs a collective"
            )


def on_cuda(args: tuple[Any, ...]) -> bool:
    """Whether the first tensor of a call is on a GPU."""
    for arg in args:
        if isinstance(arg, torch.Tensor):
            return nvidia.is_one(arg.device)
        if isinstance(arg, list) and arg:
            return on_cuda(tuple(arg))
    return False
