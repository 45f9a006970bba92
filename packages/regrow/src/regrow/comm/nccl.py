"""NCCL, or another accelerator's library, as a transport that is aborted from another thread and then made anew.

Two transports serve a job on devices: NCCL for their tensors, the mesh for those in host memory. Groups of other
accelerators are made by torch's own registration (`Backend.register_backend`). Unused without such a library.
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
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # else its watchdog ends the process when a peer dies, or at an abort
    "TORCH_NCCL_PROPAGATE_ERROR": "0",  # else it reports an error to all ranks by the store, and they end themselves
    "TORCH_NCCL_BLOCKING_WAIT": "0",  # else a wait raises by its own clock, and not when the generation is over
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # else a process whose abort takes long is ended
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",  # else a thread reads the store each second, even after the generation
}
"""Settings that keep NCCL from ending the process while regrow aborts and re-forms; they override the environment."""

LEAVE_S: Seconds = 10.0
"""Longest time that an ending process waits for the work that it has enqueued."""
ASK_S: Seconds = 1.0
"""Interval between checks for errors that groups have noticed themselves."""
ABORT_S: Seconds = 60.0
"""Longest time that an abort may take until the device has given up its work."""
_MEETING = 0x6E63636C
"""Tag of the messages by which two ranks wait for each other before their first NCCL call."""
_ALL = -1
_living: list[Communicator] = []


def available() -> bool:
    """True if this torch has NCCL and sees a GPU, or has another accelerator with groups of its own."""
    return nvidia.nccl_available() or bool(brought_for(accelerators.kind()))


def settle_environment(keep: bool) -> None:
    """Set the variables that torch reads when it makes NCCL's groups; `keep`: leave the environment's values."""
    if not keep:
        os.environ.update(_OURS)


Connect = Callable[[Store, int, int, Seconds, Wanted], Communicator]
"""Makes the communicator of one rank: store, rank, ranks, time limit of one collective, and the script's options."""


def connect(store: Store, rank: int, size: int, run_s: Seconds, wanted: Wanted) -> Communicator:
    """Make a communicator of NCCL, or of the accelerator's library; it connects at its first collective."""
    if brought_for(accelerators.kind()):
        return make_brought(accelerators.kind(), store, rank, size, run_s, wanted)
    settle_environment(keeps_nccl_settings())
    return make_communicator(store, rank, size, run_s, wanted)


def _stays(inner: Communicator) -> None:
    """Never destroy the communicator: its destructor waits for its threads, which wait for the GIL to call the store.

    Dropping the last reference with the GIL held can hang, and can crash at the interpreter's end.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(inner))


def _leave() -> None:
    """At exit, end the communicators while the interpreter still exists, as their threads may call the store.

    Wait for enqueued work first, because peers may need it.
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


class CheckedGroup(Protocol):
    """A communicator whose errors `DeviceErrors` checks."""

    @property
    def aborting(self) -> bool:
        """True if the communicator was aborted."""
        ...

    def error(self) -> str:
        """The communicator's error; empty if there is none."""
        ...


class DeviceErrors:
    """Checks the groups of this process for errors, in a thread that starts with the first group.

    The training thread may be blocked: when a link, a port or a peer is lost, a wait for the device never ends.

    Args:
        living: returns the present groups.
    """

    def __init__(self, living: Sequence[CheckedGroup]) -> None:
        self._living = living
        self.report: Callable[[str], None] | None = None
        """Called with an error that no abort of regrow's has caused, once for each group, from a thread of its own."""
        self._reported: list[CheckedGroup] = []
        self._asking: threading.Thread | None = None

    def watch(self) -> None:
        """Start the checks, because there is now a group."""
        if self._asking is None:
            self._asking = threading.Thread(target=self._ask_always, name="regrow-device-errors", daemon=True)
            self._asking.start()

    def ask(self) -> None:
        """Check all groups once."""
        living = list(self._living)
        self._reported = [each for each in self._reported if each in living]
        for each in [each for each in living if each not in self._reported and not each.aborting]:
            error = each.error()
            if error and not each.aborting and self.report is not None:  # an abort meanwhile looks like an error
                self._reported.append(each)
                self.report(error)

    def _ask_always(self) -> None:
        pause = threading.Event()
        while not pause.wait(ASK_S):
            self.ask()
            WAITS.look(time.monotonic())


ERRORS = DeviceErrors(_living)
"""The checks of this process."""


class NcclTransport:
    """NCCL for a device's tensors and the mesh for those in host memory, as one transport.

    Before their first NCCL call, ranks wait for each other on the mesh: NCCL waits for ever, and cannot be aborted, if
    a rank to which it connects has died before.

    Args:
        run_s: time limit of one collective, in seconds.
        wanted: the script's options.
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
        if self._inner.aborting:  # it may have been aborted since it was made
            self._inner.before_abort()

    def call(
        self, name: str, args: tuple[Any, ...], options: dict[str, Any], done: Callable[[], None] | None = None
    ) -> Any:
        """Run one method, by NCCL if its first tensor is on a GPU; returns unfinished work for a coalesced call.

        `done` is called when the answer is available to work that is enqueued afterwards.
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
            # This call connects, and waits for peers that may never come, until the abort.
            FLIGHT.name(DEVICE)
            flight = FLIGHT.begin()
            try:
                work = getattr(inner.group, name)(*args, **options)
            finally:
                FLIGHT.end(flight)
        self._connected.add(way)
        return work

    def _meet(self, peer: int) -> None:
        """Wait until rank `peer`, or the whole group, reaches its first call too. Raises errors of collectives."""
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
        """Join the calls that follow into one for NCCL, so that their sends and receives cannot block each other."""
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
        """Close an open `start_coalescing`: NCCL keeps it open for the thread, and would add later calls to it.

        Raises `StateError` if NCCL refuses, so that torch would count this thread as coalescing for ever.
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
        """Set the time limit of later collectives."""
        self._run_s = seconds
        self._mesh.set_timeout(seconds)
        if self._inner is not None:
            self._inner.set_timeout(seconds)

    def broke(self) -> bool:
        """True if a collective has failed."""
        return self._mesh.broke() or (self._inner is not None and self._inner.error() != "")

    def misuse(self) -> CollectiveMisuse | None:
        """The first error in the script's own calls on the mesh; NCCL raises its errors itself."""
        return self._mesh.misuse()

    def halt(self) -> None:
        """Shut down the mesh, and have the communicator aborted."""
        self._mesh.halt()
        if self._inner is not None:
            self._inner.begin_abort()

    def close(self) -> None:
        """Free the mesh and the communicator. Raises `DeadlineExceeded` if the device does not give up its work."""
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
    """True if NCCL or a similar library runs collectives on tensors of this device."""
    return nvidia.is_one(device) or (accelerators.is_accelerator(device) and bool(brought_for(device.type)))


def refuse_captured(name: str, args: tuple[Any, ...]) -> None:
    """Raise `CollectiveMisuse` if a graph records this call, since no abort ends a replay, and no halt sees it.

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
    """True if the first tensor of a call is on a device that NCCL or a similar library serves."""
    for arg in args:
        if isinstance(arg, torch.Tensor):
            return serves(arg.device)
        if isinstance(arg, list) and arg:
            return on_device(tuple(arg))
    return False
