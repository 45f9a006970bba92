"""The stand-in accelerator in Python: `load()` makes torch's device `standin` and its module `torch.standin`.

Its memory is the host's and its arithmetic the processor's, so results are the processor's bit for bit. All else is an
accelerator's: operators run later, on threads that are its streams, the host learns of an error at some later call and
from then on at every call, memory comes back late, and what is read before it is there, or after it was freed, is NaN.

Environment: `STANDIN_DEVICES` (2), `STANDIN_LAG_US` (how long each launch takes besides its arithmetic, 0),
`STANDIN_QUEUE` (launches that a stream holds, 1024), `STANDIN_MEMORY` (bytes of each device), `STANDIN_POISON` (1),
`STANDIN_TRACE` (0), `STANDIN_GROUPS` (0; 1: it brings process groups of its own, `standinccl`, as NVIDIA brings NCCL).

Source: torch's extension points for devices, https://docs.pytorch.org/tutorials/advanced/privateuseone.html
"""

import contextlib
import ctypes
import functools
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.backend_registration import (
    generate_methods_for_privateuse1_backend,
    rename_privateuse1_backend,
)

from . import building

NAME = "standin"
Where = int | str | torch.device | None


def load() -> "Steering":
    """Make the device known to torch; once in a process. Raises `building.Unbuildable`."""
    return _loaded()


@functools.cache
def _loaded() -> "Steering":
    path = str(building.library())
    torch.ops.load_library(path)  # type: ignore[no-untyped-call]
    rename_privateuse1_backend(NAME)
    steering = Steering(ctypes.CDLL(path), ctypes.PyDLL(path))
    _bring_module(steering)
    if int(os.environ.get("STANDIN_GROUPS", "0")):
        _bring_groups(path)
    # Without it torch's `.to()` gives a module that has one weight twice two of them.
    torch.__future__.set_swap_module_params_on_conversion(True)
    return steering


def _bring_groups(path: str) -> None:
    loader = importlib.machinery.ExtensionFileLoader("standin_groups", path)
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)

    def create(asked: Any, options: Any) -> Any:
        if options is not None:
            GROUP_OPTIONS.append((asked.group_id, options))
        seconds = asked.timeout.total_seconds()
        return module.Communicator(asked.store, asked.group_rank, asked.group_size, seconds)

    dist.Backend.register_backend("standinccl", create, extended_api=True, devices=[NAME])


GROUP_OPTIONS: list[tuple[str, Any]] = []
"""Options that groups of this process were made with, each time that they were made, with the name of the group."""


SPOILT = ("", "hang", "error", "hold connect", "die in connect")
"""Ways to spoil a collective or a connection: see groups.cpp."""


class Steering:
    """Controls of the device for tests, and its counts."""

    def __init__(self, library: ctypes.CDLL, holding: ctypes.PyDLL) -> None:
        self._library, self._holding = library, holding
        for name in ("close_gate", "depth", "launches", "waits", "live", "held", "peak", "total"):
            getattr(library, f"standin_{name}").restype = ctypes.c_int64

    def _call(self, name: str, *numbers: int) -> int:
        given = (
            ctypes.c_int64(number) if name in ("open_gate", "queue_limit", "spoil") else number for number in numbers
        )
        return int(getattr(self._library, f"standin_{name}")(*given))

    @property
    def devices(self) -> int:
        """The number of devices."""
        return self._call("devices")

    @property
    def initialized(self) -> bool:
        """True if this process has taken it into use."""
        return bool(self._call("initialized"))

    @property
    def forked(self) -> bool:
        """True if this is a fork of a process that had: it cannot be used here."""
        return bool(self._call("forked"))

    def fail(self, device: int = 0, *, in_stream: bool = False) -> None:
        """Every call of the device raises from now on, or from where its current stream comes to this point."""
        self._call("fail_in_stream" if in_stream else "fail", device)

    def failed(self, device: int = 0) -> bool:
        """True if the device has failed."""
        return bool(self._call("failed", device))

    @contextmanager
    def gate(self, device: int = 0) -> Iterator[None]:
        """The current stream stands at this point as long as the block lasts."""
        closed = self._call("close_gate", device)
        try:
            yield
        finally:
            self._call("open_gate", closed)

    def spoil(self, how: str, after: int = 0) -> None:
        """Spoil one collective of this process (or one connection) by one of `SPOILT`, once, after `after` others."""
        self._call("spoil", SPOILT.index(how), after)

    def launch_holding(self, device: int, times: int, *, victim: int = 0) -> None:
        """Launch kernels that do nothing, and keep the interpreter's lock until there is room for all of them.

        `victim`: a process that is killed first.
        """
        self._holding.standin_launch(device, ctypes.c_int64(times), ctypes.c_int64(victim))

    def queue_limit(self, launches: int) -> None:
        """Set the number of launches that a stream holds before the next one holds its caller."""
        self._call("queue_limit", launches)

    def depth(self, device: int = 0) -> int:
        """Tasks that are queued in the current stream, or run."""
        return self._call("depth", device)

    def launches(self, device: int = 0) -> int:
        """Kernels and copies so far."""
        return self._call("launches", device)

    def waits(self, device: int = 0) -> int:
        """Times that the host has waited for the device so far."""
        return self._call("waits", device)

    def live(self, device: int = 0) -> int:
        """Bytes that tensors have."""
        return self._call("live", device)

    def held(self, device: int = 0) -> int:
        """Bytes that tensors or queued work have."""
        return self._call("held", device)

    def peak(self, device: int = 0) -> int:
        """The most bytes that tensors had."""
        return self._call("peak", device)

    def total(self) -> int:
        """Bytes of a device."""
        return self._call("total")


def _index(where: Where = None) -> int:
    device = where if isinstance(where, torch.device) else torch.device(where) if isinstance(where, str) else None
    index = where if isinstance(where, int) else None if device is None else device.index
    return torch.accelerator.current_device_index() if index is None or index < 0 else index


class Stream(torch.Stream):
    """As `torch.cuda.Stream`."""

    def __new__(cls, device: Where = None, priority: int = 0, **given: Any) -> "Stream":
        """A new stream, or the one that `stream_id` and the like name."""
        if "stream_id" in given:
            return super().__new__(cls, priority=priority, **given)
        return super().__new__(cls, device=torch.device(NAME, _index(device)), priority=priority)

    def wait_event(self, event: torch.Event) -> None:
        """Let all work queued from now on come after the event."""
        event.wait(self)


class Event(torch.Event):
    """As `torch.cuda.Event`."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> "Event":
        """An event that was not recorded yet."""
        return super().__new__(cls, device=NAME, enable_timing=enable_timing)


class Current:
    """As `torch.cuda.device`: another device is the current one within it."""

    def __init__(self, device: Where) -> None:
        self.idx = _index(device)

    def __enter__(self) -> None:
        """Take it."""
        self._before = torch.accelerator.current_device_index()
        torch.accelerator.set_device_index(self.idx)

    def __exit__(self, *_: object) -> None:
        """Take the one before again."""
        torch.accelerator.set_device_index(self._before)


class Module(types.ModuleType):
    """`torch.standin`, with the names that `torch.cuda` has and torch's own code asks of a device."""

    Stream, Event, device = Stream, Event, Current

    def __init__(self, steering: Steering) -> None:
        super().__init__(f"torch.{NAME}", __doc__)
        self.__file__, self.__path__ = __file__, []
        self._steering, self._capturing = steering, False
        devices = range(steering.devices)
        self.default_generators: tuple[torch.Generator, ...] = tuple(
            torch.ops.standin.default_generator(index) for index in devices
        )
        self.set_stream = torch.accelerator.set_stream

    @property
    def _initialized(self) -> bool:  # torch's checkpoints of activations ask for it
        return self._steering.initialized

    def is_initialized(self) -> bool:
        """True if this process has taken it into use."""
        return self._steering.initialized

    def _is_in_bad_fork(self) -> bool:
        return self._steering.forked

    def _lazy_init(self) -> None: ...

    def is_available(self) -> bool:
        """True if there is a device."""
        return self.device_count() > 0

    def device_count(self) -> int:
        """The number of devices."""
        return self._steering.devices

    def current_device(self) -> int:
        """This thread's."""
        return torch.accelerator.current_device_index()

    def set_device(self, device: Where) -> None:
        """Choose this thread's."""
        torch.accelerator.set_device_index(_index(device))

    def synchronize(self, device: Where = None) -> None:
        """Wait for all that it was given."""
        torch.accelerator.synchronize(_index(device))

    def current_stream(self, device: Where = None) -> torch.Stream:
        """The one that this thread queues on."""
        return torch.accelerator.current_stream(_index(device))

    def default_stream(self, device: Where = None) -> torch.Stream:
        """The one that is current at first."""
        kind = torch._C._autograd.DeviceType.PrivateUse1.value
        return Stream(stream_id=0, device_index=_index(device), device_type=kind)

    def stream(self, stream: torch.Stream | None) -> contextlib.AbstractContextManager[Any]:
        """Queue on that stream within the block."""
        return contextlib.nullcontext() if stream is None else stream

    @contextmanager
    def capture(self) -> Iterator[None]:
        """A graph records, as far as who asks can tell: what is called still runs."""
        self._capturing = True
        try:
            yield
        finally:
            self._capturing = False

    def is_current_stream_capturing(self) -> bool:
        """True if a stream does."""
        return self._capturing

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """Types that autocast may be asked for. It leaves operators as they are."""
        return [torch.float16, torch.bfloat16]

    def is_bf16_supported(self, including_emulation: bool = True) -> bool:
        """True if it computes in bfloat16."""
        return True

    def get_device_name(self, device: Where = None) -> str:
        """Its model."""
        return "stand-in"

    def get_device_properties(self, device: Where = None) -> types.SimpleNamespace:
        """Its model and memory."""
        return types.SimpleNamespace(name="stand-in", total_memory=self._steering.total())

    def empty_cache(self) -> None:
        """There is no cache."""

    def memory_allocated(self, device: Where = None) -> int:
        """Bytes that tensors have."""
        return self._steering.live(_index(device))

    def memory_reserved(self, device: Where = None) -> int:
        """Bytes that tensors or queued work have."""
        return self._steering.held(_index(device))

    def max_memory_allocated(self, device: Where = None) -> int:
        """The most bytes that tensors had."""
        return self._steering.peak(_index(device))

    def mem_get_info(self, device: Where = None) -> tuple[int, int]:
        """Free and total bytes."""
        return self._steering.total() - self.memory_reserved(device), self._steering.total()

    def get_rng_state(self, device: Where = NAME) -> torch.Tensor:
        """State of its generator."""
        return self.default_generators[_index(device)].get_state()

    def set_rng_state(self, state: torch.Tensor, device: Where = NAME) -> None:
        """Put its generator there."""
        self.default_generators[_index(device)].set_state(state)

    def get_rng_state_all(self) -> list[torch.Tensor]:
        """States of all generators."""
        return [each.get_state() for each in self.default_generators]

    def set_rng_state_all(self, states: Sequence[torch.Tensor]) -> None:
        """Put all generators there."""
        for each, state in zip(self.default_generators, states, strict=True):
            each.set_state(state)

    def manual_seed(self, seed: int) -> None:
        """Seed the current device's generator."""
        self.default_generators[_index()].manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seed all generators."""
        for each in self.default_generators:
            each.manual_seed(seed)

    def initial_seed(self) -> int:
        """The seed of the current device's generator."""
        return self.default_generators[_index()].initial_seed()


def _bring_module(steering: Steering) -> None:
    module = Module(steering)
    torch._register_device_module(NAME, module)  # type: ignore[no-untyped-call]
    sys.modules[f"torch.{NAME}"] = module
    generate_methods_for_privateuse1_backend(for_storage=True)
