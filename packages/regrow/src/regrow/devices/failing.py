"""Checks whether an accelerator has failed for good: after some errors it answers nothing until the process ends.

CUDA does this after a device-side assert, an illegal access or an uncorrectable memory error: every later call raises
the same error. An error of a single call, such as running out of memory, leaves the device usable.
"""

import threading
from collections.abc import Iterator

import torch

from regrow.core.ids import Seconds
from regrow.devices import accelerators

ANSWER_S: Seconds = 10.0
"""Longest time for a device to show that it works, after it has raised an error."""
_SAID = ("CUDA error:", "HIP error:")
"""Prefixes of device errors for which torch has no type of its own."""


def is_device_error(error: BaseException) -> bool:
    """True if an accelerator raised the error or one of its causes."""
    return any(
        isinstance(each, torch.AcceleratorError) or (isinstance(each, RuntimeError) and str(each).startswith(_SAID))
        for each in behind(error)
    )


def has_failed(error: BaseException) -> str:
    """Reason why the device in use will never answer again; empty if it still works, or the error is not a device's.

    The device is asked twice: the first answer may be the error that is known already.
    """
    if not is_device_error(error) or accelerators.in_use() is None:
        return ""
    return _asked() and _asked()


def _asked() -> str:
    """Wait for all work of this thread's device; returns its error, empty if it has done all the work."""
    device, said = torch.accelerator.current_device_index(), ["it does not answer"]

    def ask() -> None:
        try:
            torch.accelerator.synchronize(device)
        except RuntimeError as error:
            said[0] = str(error).partition("\n")[0] or type(error).__name__
        else:
            said[0] = ""

    asking = threading.Thread(target=ask, name="regrow-ask-device", daemon=True)
    asking.start()
    asking.join(ANSWER_S)
    return said[0]


def behind(error: BaseException) -> Iterator[BaseException]:
    """The error and its causes."""
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        yield at
        at = at.__cause__ or at.__context__
