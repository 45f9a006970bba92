"""A process group of torch's own over NCCL, or over another accelerator's library, without a default group."""

import ctypes
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from regrow.comm.torch_private.internals import (
    Backend,
    DistributedBackendOptions,
    ProcessGroup,
    Store,
    Work,
    inner_group,
)
from regrow.core.errors import GenerationHalted, UsageError
from regrow.core.ids import Seconds
from regrow.devices import nvidia

BACKEND = "regrow"
"""Name of regrow's backend in torch's registry."""
_SHAM = "fake"
"""torch's backend without communication, for tests and for planning."""
_TORCHS = ("gloo", "nccl", "xccl", "ucc", "mpi")
_PASSED = ("is_high_priority_stream", "config")
"""NCCL's settings that a script gives in a group's options; the time limit has an argument of its own."""
CALL_S: Seconds = 1.0
"""Longest time that an abort waits for calls of other threads, which only enqueue work."""


@dataclass(frozen=True)
class Wanted:
    """A script's options for a group on devices.

    Attributes:
        name: name of the group, as torch's flight recorder shows it.
        ranks: ranks in the world, in the group's order.
        options: the backend's options from `new_group(pg_options=...)`; None: there are none.
    """

    name: str = ""
    ranks: Sequence[int] = ()
    options: Any = None


NOTHING = Wanted()


class Communicator:
    """A device's backend (NCCL's, or a similar one) and the process group that runs its collectives."""

    def __init__(self, backend: Any, group: Any) -> None:
        self.backend, self.group = backend, group
        self._changed = threading.Condition()
        self._inside = 0
        self._aborting: threading.Thread | None = None
        self.before_abort: Callable[[], None] = lambda: None
        """Called by the aborting thread just before the abort."""

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Context in which a thread calls NCCL. Raises `GenerationHalted` if the abort has begun."""
        self._enter()
        try:
            yield
        finally:
            self._leave()

    def _enter(self) -> None:
        with self._changed:
            if self._aborting is not None:
                raise GenerationHalted("NCCL was aborted")
            self._inside += 1

    def _leave(self) -> None:
        with self._changed:
            self._inside -= 1
            self._changed.notify_all()

    @property
    def aborting(self) -> bool:
        """True once the communicator's abort has begun."""
        return self._aborting is not None

    def begin_abort(self) -> None:
        """Start to end all its work, including work on the device, without waiting for the end. From any thread.

        Several communicators are aborted concurrently: the kernels of one may wait behind those of another, and NCCL's
        abort of one returns only when its own have ended.
        """
        with self._changed:
            if self._aborting is None:
                self._aborting = threading.Thread(target=self._abort, name="regrow-abort", daemon=True)
                self._aborting.start()

    def _abort(self) -> None:
        with self._changed:
            # NCCL does not support an abort while another thread enqueues; that thread may also be blocked.
            self._changed.wait_for(lambda: not self._inside, CALL_S)
            late = self._inside
        self.before_abort()
        self._abort_together()
        if late:
            with self._changed:
                self._changed.wait_for(lambda: not self._inside)  # `await_abort` still keeps its own time limit
            self._abort_together()  # abort connections that the call has made meanwhile

    def _abort_together(self) -> None:
        """Abort all connections of the group as one, if possible: their kernels may wait behind one another too."""
        begin = getattr(self.backend, "_group_start", None)
        if begin is None:
            self.backend.abort()
            return
        begin()
        self.backend.abort()
        self.backend._group_end()

    def error(self) -> str:
        """The error that the communicator has noticed itself, in a word; empty if none, or if its kind reports none."""
        said = getattr(self.backend, "get_error", None)
        try:
            found = said() if said is not None else None
        except RuntimeError as refused:
            if "does not support" not in str(refused):  # torch's message for a function that a kind of group lacks
                raise
            found = None
        return "" if found is None or found.value == 0 else str(getattr(found, "name", found))

    def await_abort(self, within: Seconds) -> bool:
        """Wait at most `within` seconds for the end of the abort that `begin_abort` began; True if it is done."""
        with self._changed:
            aborting = self._aborting
        if aborting is None:
            return True
        aborting.join(within)
        return not aborting.is_alive()

    def start_coalescing(self, device: torch.device) -> None:
        """Join later calls into one for NCCL, until `end_coalescing`; an abort waits until then.

        Raises `GenerationHalted` if the abort has begun.
        """
        self._enter()
        try:
            self.group._start_coalescing(device)
        except BaseException:
            self._leave()
            raise

    def end_coalescing(self, device: torch.device) -> Work:
        """The work of the calls since `start_coalescing`."""
        try:
            work: Work = self.group._end_coalescing(device)
        finally:
            self._leave()
        return work

    def set_timeout(self, seconds: Seconds) -> None:
        """Set the time limit of later collectives."""
        change = getattr(self.backend, "_set_default_timeout", None) or self.backend.set_timeout
        change(timedelta(seconds=seconds))


def brought_for(kind: str) -> str:
    """Name of the third-party backend registered with torch for devices of this kind; empty if there is none.

    From 2.15 on torch registers its own backends in the same way, once one is used; these are left out.

    Source: https://docs.pytorch.org/docs/stable/distributed.html#third-party-backends
    """
    name = Backend.default_device_backend_map.get(kind, "")
    return name if name.upper() in Backend._plugins and name not in (BACKEND, _SHAM, *_TORCHS) else ""


def make_brought(kind: str, store: Store, rank: int, size: int, run_s: Seconds, wanted: Wanted) -> Communicator:
    """Make a communicator of the backend registered for this kind of device, with the script's options, if any."""
    made = Backend._plugins[brought_for(kind).upper()]
    limit = timedelta(seconds=run_s)
    if made.extended_api:
        asked = DistributedBackendOptions()
        asked.store, asked.group_rank, asked.group_size = store, rank, size
        asked.timeout, asked.group_id, asked.global_ranks_in_group = limit, wanted.name, list(wanted.ranks)
        backend: Any = made.creator_fn(asked, wanted.options)
    else:
        backend = made.creator_fn(store, rank, size, limit)
    group = inner_group(store, rank, size)
    group._register_backend(torch.device(kind), ProcessGroup.BackendType.CUSTOM, backend)
    group._set_default_backend(ProcessGroup.BackendType.CUSTOM)
    return Communicator(backend, group)


def make_communicator(store: Store, rank: int, size: int, run_s: Seconds, wanted: Wanted) -> Communicator:
    """Make a communicator of NCCL, which connects at its first collective."""
    from torch.distributed import ProcessGroupNCCL

    options = nccl_options(ProcessGroupNCCL.Options(), wanted)
    options._timeout = timedelta(seconds=run_s)
    backend = ProcessGroupNCCL(store, rank, size, options)
    group = inner_group(store, rank, size)
    group._register_backend(torch.device(nvidia.KIND), ProcessGroup.BackendType.NCCL, backend)
    group._set_default_backend(ProcessGroup.BackendType.NCCL)
    return Communicator(backend, group)


def native_abort(backend: Any) -> tuple[int, int] | None:
    """Addresses of a C function that aborts the backend, and of its argument; None for backends without one."""
    if hasattr(backend, "native_abort"):
        function, argument = backend.native_abort()
        return int(function), int(argument)
    return method_of(backend, "libtorch_cuda.so", "16ProcessGroupNCCL", "5abortEv")


def method_of(instance: object, library: str, kind: str, method: str) -> tuple[int, int] | None:
    """Addresses of a method and an object of one of torch's classes, by their mangled names in its libraries, or None.

    pybind11 keeps the object's address behind the Python object's header; an object begins with its vtable pointer.
    """
    if type(type(instance)).__name__ != "pybind11_type":  # another object's memory has no such address
        return None
    try:
        found = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / library), mode=os.RTLD_NOLOAD)
        function = ctypes.cast(getattr(found, f"_ZN4c10d{kind}{method}"), ctypes.c_void_p).value
        table = ctypes.addressof(ctypes.c_void_p.in_dll(found, f"_ZTVN4c10d{kind}E"))
    except (OSError, AttributeError, ValueError):
        return None
    this = ctypes.c_void_p.from_address(id(instance) + object.__basicsize__).value
    known = this and ctypes.c_void_p.from_address(this).value == table + 2 * ctypes.sizeof(ctypes.c_void_p)
    return (function, this) if known and function and this else None


def nccl_options(fresh: Any, wanted: Wanted) -> Any:
    """New options with the script's settings, because torch writes to the options with which a group was made.

    Raises `UsageError` if the script's options are not NCCL's.
    """
    given = wanted.options
    if given is not None and not isinstance(given, type(fresh)):
        raise UsageError(
            f"pg_options of {wanted.name or 'a group'} are {type(given).__name__}, and its devices are served by NCCL",
            hint="give torch.distributed.ProcessGroupNCCL.Options, or leave pg_options= out",
        )
    for name in _PASSED if given is not None else ():
        if hasattr(given, name):
            setattr(fresh, name, getattr(given, name))
    for name, shown in (("global_ranks_in_group", list(wanted.ranks)), ("group_name", wanted.name)):
        if hasattr(fresh, name):
            setattr(fresh, name, shown)
    return fresh
