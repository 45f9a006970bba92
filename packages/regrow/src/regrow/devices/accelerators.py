"""Interface to an accelerator of any kind: `torch.accelerator`, and the module of torch that it has.

CUDA, XPU, MPS, and the devices of others have modules with the same names; some lack a few.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from regrow.core.errors import UsageError
from regrow.devices import nvidia

_IN_HOST_MEMORY = ("cpu", "meta")


def on_accelerator(tensor: torch.Tensor) -> bool:
    """True if its elements lie on a device, where work is only enqueued."""
    return is_accelerator(tensor.device)


def is_accelerator(device: torch.device) -> bool:
    """True if this is a device, and not the processor."""
    return device.type not in _IN_HOST_MEMORY


def kind() -> str:
    """The kind of accelerator that this torch knows, such as `cuda`; empty for none. It takes no device into use."""
    device = torch.accelerator.current_accelerator()
    return device.type if device is not None else ""


def kinds() -> list[str]:
    """The devices that groups serve: the processor, CUDA's name, and the accelerator's."""
    return list(dict.fromkeys(["cpu", nvidia.KIND, *filter(None, [kind()])]))


def in_use() -> Any:
    """The module of the accelerator that this process has taken into use; None for none.

    A module that does not say whether it was initialized is in use where it has devices.
    """
    found = kind()
    if not found:
        return None
    module = torch.get_device_module(found)
    initialized: Callable[[], bool] = getattr(module, "is_initialized", torch.accelerator.is_available)
    return module if initialized() else None


def seed(number: int) -> None:
    """Seed the generators of all devices in use; nothing where none is: to seed earlier would only queue up calls.

    Raises `UsageError` for an accelerator that has no way to be seeded: dropout would differ after a fault.
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
    """State of the generator of this thread's device; None if no device is in use, or its kind does not tell."""
    module = in_use()
    said: Callable[[], torch.Tensor] | None = getattr(module, "get_rng_state", None)
    return None if said is None else said()


def put_random_state(state: torch.Tensor) -> None:
    """Put back what `random_state` has told."""
    torch.get_device_module(kind()).set_rng_state(state)


def choose(local_rank: int) -> torch.device:
    """The device of a rank of this node, which is this thread's from now on; the processor where there is none.

    Raises torch's error where the node has fewer devices than ranks.
    """
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    device = torch.device(kind(), local_rank)
    torch.accelerator.set_device_index(device)
    return device


def name_of(device: torch.device) -> str:
    """Its model, as `NVIDIA H200`; empty where its kind does not say, or for the processor."""
    said = getattr(torch.get_device_module(device), "get_device_name", None) if is_accelerator(device) else None
    return "" if said is None else str(said(device))


def memory_peak(device: torch.device) -> Callable[[], int] | None:
    """Function that returns the most bytes that tensors have had on it; None if its kind counts none."""
    said = getattr(torch.get_device_module(device), "max_memory_allocated", None) if is_accelerator(device) else None
    return None if said is None else functools.partial(said, device)


def host_memory(shape: Sequence[int], dtype: torch.dtype, beside: torch.device | None) -> torch.Tensor:
    """Memory of the processor for copies from or to a device.

    Page-locked where its kind can have that: copies then need no second buffer of the driver's.
    """
    pinned = beside is not None and is_accelerator(beside) and _pins()
    return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=pinned)  # the script's default may be another


@functools.cache
def _pins() -> bool:
    try:
        torch.empty(1, device="cpu", pin_memory=True)
    except (RuntimeError, NotImplementedError):
        return False
    return True


def await_stream(device: torch.device) -> None:
    """Return when what this thread has enqueued on its current stream of the device is done."""
    torch.accelerator.current_stream(device).synchronize()


def give_back_memory() -> None:
    """Give the memory that torch keeps for later tensors back to the device in use; nothing where none is.

    Raises the device's error if it has failed.
    """
    give = getattr(in_use(), "empty_cache", None)
    if give is not None:
        give()


def all_taken(ranks: int) -> bool:
    """True if this process uses a device, and the node has no more of them than ranks."""
    return in_use() is not None and torch.accelerator.device_count() <= ranks


def stream_of_its_own(device: torch.device) -> torch.Stream | None:
    """A new stream before others of less priority; None where its kind has only one."""
    try:
        return torch.Stream(device=device, priority=-1)
    except (RuntimeError, NotImplementedError):
        return None


def is_capturing(device: torch.device) -> bool:
    """True if work enqueued on this thread's stream of the device is kept for a graph, and not run."""
    said = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    return said is not None and bool(said())
