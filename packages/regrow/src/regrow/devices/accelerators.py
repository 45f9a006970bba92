"""Interface to an accelerator of any kind: `torch.accelerator`, and its device module.

CUDA, XPU, MPS, and third-party devices have modules with the same names; some lack a few.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from regrow.core.errors import UsageError
from regrow.devices import nvidia

_IN_HOST_MEMORY = ("cpu", "meta")


def on_accelerator(tensor: torch.Tensor) -> bool:
    """True if the tensor's elements are on an accelerator, where work is only enqueued."""
    return is_accelerator(tensor.device)


def is_accelerator(device: torch.device) -> bool:
    """True if the device is an accelerator, and not the processor."""
    return device.type not in _IN_HOST_MEMORY


def kind() -> str:
    """The kind of accelerator that this torch knows, such as `cuda`; empty for none. It initializes no device."""
    device = torch.accelerator.current_accelerator()
    return device.type if device is not None else ""


def kinds() -> list[str]:
    """Device types that groups serve: the processor's, CUDA's, and the accelerator's."""
    return list(dict.fromkeys(["cpu", nvidia.KIND, *filter(None, [kind()])]))


def in_use() -> Any:
    """The module of the accelerator that this process uses; None if it uses none.

    A module that does not report whether it was initialized counts as used if it has devices.
    """
    found = kind()
    if not found:
        return None
    module = torch.get_device_module(found)
    initialized: Callable[[], bool] = getattr(module, "is_initialized", torch.accelerator.is_available)
    return module if initialized() else None


def seed(number: int) -> None:
    """Seed the generators of all devices in use; without such a device does nothing, as seeds would only be queued.

    Raises `UsageError` for an accelerator that cannot be seeded: dropout would differ after a fault.
    """
    module = in_use()
    if module is None:
        return
    by = getattr(module, "manual_seed_all", None) or getattr(module, "manual_seed", None)
    if by is None:
        raise UsageError(
            f"torch.{kind()} has neither manual_seed_all nor manual_seed: what is drawn on the device would come out "
            "different after a fault",
            hint="its backend for torch has to bring one",
        )
    by(number)


def random_state() -> torch.Tensor | None:
    """State of the generator of this thread's device; None if no device is in use, or its kind does not provide it."""
    module = in_use()
    said: Callable[[], torch.Tensor] | None = getattr(module, "get_rng_state", None)
    return None if said is None else said()


def put_random_state(state: torch.Tensor) -> None:
    """Restore the state that `random_state` returned."""
    torch.get_device_module(kind()).set_rng_state(state)


def choose(local_rank: int) -> torch.device:
    """Make the device of a rank of this node this thread's current one, and return it; the processor if there is none.

    Raises torch's error if the node has fewer devices than ranks.
    """
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    device = torch.device(kind(), local_rank)
    torch.accelerator.set_device_index(device)
    return device


def name_of(device: torch.device) -> str:
    """Model of the device, such as `NVIDIA H200`; empty if its kind does not report it, or for the processor."""
    said = getattr(torch.get_device_module(device), "get_device_name", None) if is_accelerator(device) else None
    return "" if said is None else str(said(device))


def memory_peak(device: torch.device) -> Callable[[], int] | None:
    """Function that returns the most bytes that tensors have had on the device; None if its kind counts none."""
    said = getattr(torch.get_device_module(device), "max_memory_allocated", None) if is_accelerator(device) else None
    return None if said is None else functools.partial(said, device)


def host_memory(shape: Sequence[int], dtype: torch.dtype, beside: torch.device | None) -> torch.Tensor:
    """Allocate host memory for copies from or to a device.

    It is page-locked if the device's kind supports that: copies then need no second buffer of the driver's.
    """
    pinned = beside is not None and is_accelerator(beside) and _pins()
    return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=pinned)  # the script may set another default device


@functools.cache
def _pins() -> bool:
    try:
        torch.empty(1, device="cpu", pin_memory=True)
    except (RuntimeError, NotImplementedError):
        return False
    return True


def await_stream(device: torch.device) -> None:
    """Wait until all work that this thread has enqueued on its current stream of the device is done."""
    torch.accelerator.current_stream(device).synchronize()


def give_back_memory() -> None:
    """Free the memory that torch caches for later tensors on the device in use; does nothing without such a device.

    Raises the device's error if it has failed.
    """
    give = getattr(in_use(), "empty_cache", None)
    if give is not None:
        give()


def all_taken(ranks: int) -> bool:
    """True if this process uses a device, and the node has no more devices than ranks."""
    return in_use() is not None and torch.accelerator.device_count() <= ranks


def stream_of_its_own(device: torch.device) -> torch.Stream | None:
    """A new stream of high priority; None if the device's kind has only one stream."""
    try:
        return torch.Stream(device=device, priority=-1)
    except (RuntimeError, NotImplementedError):
        return None


def is_capturing(device: torch.device) -> bool:
    """True if work enqueued on this thread's stream of the device is recorded for a graph instead of run."""
    said = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    return said is not None and bool(said())
