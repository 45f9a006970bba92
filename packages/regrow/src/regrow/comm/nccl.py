"""NCCL behind the same seam, or what another accelerator has for it: aborted from another thread, then a new one.

Two transports serve a job on devices: NCCL for their tensors, the mesh for the processor's. Other accelerators' groups
are taken by torch's own registration (`Backend.register_backend`). Where neither is there nothing here is used.
"""

import ctypes
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from regrow.comm.flight import FLIGHT
from regrow.comm.on_device.bell import BELLS
from regrow.comm.on_device.waits import WAITS
from regrow.comm.torch_private.internals import Store, Work
from regrow.comm.torch_private.nccl_group import (
    NOTHING,
    Communicator,
    Wanted,
    brought_for,
    make_brought,
    make_communicator,
    native_abort,
)
from regrow.comm.transport import RUN_S, MeshTransport, device_of
from regrow.core.config import keeps_nccl_settings
from regrow.core.errors import CollectiveMisuse, DeadlineExceeded, StateError
from regrow.core.ids import Seconds
from regrow.core.messages.observations import DEVICE
from regrow.core.process.forks import at_exit
from regrow.devices import accelerators, nvidia

_OURS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # else its watchdog ends the process when a peer dies, or at our own abort
    "TORCH_NCCL_PROPAGATE_ERROR": "0",  # else it tells all ranks of an error by the store, and they end themselves
    "TORCH_NCCL_BLOCKING_WAIT": "0",  # else a wait raises by its own clock, and not when the generation is over
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # else a process whose abort takes long is ended
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",  # else a thread asks the store each second, also of a generation that is over
}
"""Settings that keep NCCL from ending the process while regrow aborts and re-forms; they win over the environment."""

LEAVE_S: Seconds = 10.0
"""Wait at the end of a process for the work that it has enqueued."""
ASK_S: Seconds = 1.0
"""Interval of checks for errors that groups have seen by themselves."""
ABORT_S: Seconds = 60.0
"""Time for an abort until the device has given up its work."""
_MEETING = 0x6E63636C
"""The tag of the messages by which two ranks meet."""
_ALL = -1
_living: list[Communicator] = []


def available() -> bool:
    """True if this torch has NCCL and sees a GPU, or another accelerator with groups of its own."""
    return nvidia.nccl_available() or bool(brought_for(accelerators.kind()))


def settle_environment(keep: bool) -> None:
    """Set what torch reads when it makes NCCL's groups; `keep`: the user wants them as the environment has them."""
    if not keep:
        os.environ.update(_OURS)


Connect = Callable[[Store, int, int, Seconds, Wanted], Communicator]
"""Makes the communicator of one rank: store, rank, ranks, how long one collective may take, and the script's wishes."""


def connect(store: Store, rank: int, size: int, run_s: Seconds, wanted: Wanted) -> Communicator:
    """NCCL's own, or the accelerator's; it talks to its peers at its first collective."""
    if brought_for(accelerators.kind()):
        return make_brought(accelerators.kind(), store, rank, size, run_s, wanted)
    settle_environment(keeps_nccl_settings())
    return make_communicator(store, rank, size, run_s, wanted)


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


class Asked(Protocol):
    """Runner of the collectives of one group on a device."""

    @property
    def aborting(self) -> bool:
        """True if it was given up."""
        ...

    def error(self) -> str:
        """Its error; empty for none."""
        ...


class DeviceErrors:
    """Asks the groups of this process, from a thread that begins with the first one: the one that trains may wait.

    A link flaps, a port is lost, a peer ends: what waits for the device then never comes to its end.

    Args:
        living: those that stand now.
    """

    def __init__(self, living: Sequence[Asked]) -> None:
        self._living = living
        self.report: Callable[[str], None] | None = None
        """Told an error that no abort of ours has made; once for each group. From a thread of its own."""
        self._reported: list[Asked] = []
        self._asking: threading.Thread | None = None

    def watch(self) -> None:
        """There is a group."""
        if self._asking is None:
            self._asking = threading.Thread(target=self._ask_always, name="regrow-device-errors", daemon=True)
            self._asking.start()

    def ask(self) -> None:
        """Look at all of them once."""
        living = list(self._living)
        self._reported = [each for each in self._reported if each in living]
        for each in [each for each in living if each not in self._reported and not each.aborting]:
            error = each.error()
            if error and not each.aborting and self.report is not None:  # an abort of ours meanwhile looks like one
                self._reported.append(each)
                self.report(error)

    def _ask_always(self) -> None:
        pause = threading.Event()
        while not pause.wait(ASK_S):
            self.ask()
            WAITS.look(time.monotonic())


ERRORS = DeviceErrors(_living)
"""Of this process."""


class NcclTransport:
    """NCCL for a device's tensors and the mesh for the processor's, as one transport.

    Before their first call of NCCL ranks meet on the mesh: NCCL waits for ever, and cannot be aborted, where one that
    it shall connect to has died before.

    Args:
        run_s: how long one collective may take, in seconds.
        wanted: what the script asks for.
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
        wanted: Wanted = NOTHING,
        connect: Connect = connect,
    ) -> None:
        self._mesh = mesh
        self._store, self._rank, self._size, self._run_s = store, rank, size, run_s
        self._connect, self._wanted = connect, wanted
        self._inner: Communicator | None = None
        self._met: set[int] = set()
        self._connected: set[tuple[str, int]] = set()
        self._coalescing: torch.device | None = None

    def form(self, deadline: float) -> None:
        """Connect the mesh to all peers; NCCL connects with its first collective."""
        self._mesh.form(deadline)
        self._inner = self._connect(self._store, self._rank, self._size, self._run_s, self._wanted)
        _stays(self._inner)
        _living.append(self._inner)
        ERRORS.watch()
        self._inner.before_abort = BELLS.add(native_abort(self._inner.backend))
        if self._inner.aborting:  # since it was made
            self._inner.before_abort()

    def call(
        self, name: str, args: tuple[Any, ...], options: dict[str, Any], done: Callable[[], None] | None = None
    ) -> Any:
        """Run one method, by NCCL where its first tensor is on a GPU; of a call put together with others none is done.

        `done` is called when the answer is there for what is enqueued next.
        """
        if self._inner is not None and on_device(args):
            if self._coalescing is not None:
                return getattr(self._inner.group, name)(*args, **options)
            self._meet(int(args[1]) if name in ("send", "recv") else _ALL)
            WAITS.enqueues(device_of(args))
            work = self._enqueue(self._inner, name, args, options)
            if done is not None:
                work.wait()
                done()
            return work
        return self._mesh.call(name, args, options, done)

    def _enqueue(self, inner: Communicator, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        way = (name, int(args[1])) if name in ("send", "recv") else ("", _ALL)
        with inner.calling():
            if way in self._connected:
                return getattr(inner.group, name)(*args, **options)
            # It connects in this call, and waits for who may never come, until the abort.
            FLIGHT.name(DEVICE)
            flight = FLIGHT.begin()
            try:
                work = getattr(inner.group, name)(*args, **options)
            finally:
                FLIGHT.end(flight)
        self._connected.add(way)
        return work

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
        if self._inner is None or not serves(device):
            return False
        self._meet(_ALL)
        WAITS.enqueues(device)
        self._inner.start_coalescing(device)
        self._coalescing = device
        return True

    def end_coalescing(self, device: torch.device) -> Work | None:
        """The work of the calls since `start_coalescing`; None: the generation is over."""
        self._coalescing = None
        if self._inner is None:
            return None
        WAITS.enqueues(device)
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
        """Set the time limit of collectives that begin from now on."""
        self._run_s = seconds
        self._mesh.set_timeout(seconds)
        if self._inner is not None:
            self._inner.set_timeout(seconds)

    def broke(self) -> bool:
        """True if a collective has failed."""
        return self._mesh.broke() or (self._inner is not None and self._inner.error() != "")

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
        if not _living:
            BELLS.close()


def serves(device: torch.device) -> bool:
    """True if collectives on tensors of this device are NCCL's, or of its like."""
    return nvidia.is_one(device) or (accelerators.is_accelerator(device) and bool(brought_for(device.type)))


def refuse_captured(name: str, args: tuple[Any, ...]) -> None:
    """Raise `CollectiveMisuse` where a graph records this call: no abort ends what is replayed, and no halt sees it.

    Source: https://github.com/pytorch/pytorch/issues/115388
    """
    device = device_of(args)
    if device is not None and accelerators.is_capturing(device):
        raise CollectiveMisuse(
            f"{name} was called while a graph of {device} records: a collective in a graph cannot be given up when a "
            "rank is lost",
            hint="record the parts between collectives, as make_graphed_callables does for a module inside DDP",
        )


def on_device(args: tuple[Any, ...]) -> bool:
    """True if the first tensor of a call is on a device that NCCL, or its like, serves."""
    for arg in args:
        if isinstance(arg, torch.Tensor):
            return serves(arg.device)
        if isinstance(arg, list) and arg:
            return on_device(tuple(arg))
    return False
