"""Waits for device memory that a dead process still holds: it may come back a minute after the process's end.

Source: https://github.com/NVIDIA-NeMo/RL/issues/3592
"""

import time
from collections.abc import Callable

import torch

from regrow.core.ids import Instant, Seconds
from regrow.devices import accelerators
from regrow.devices.failing import behind

MOST_S: Seconds = 60.0
"""Longest wait: memory that has not come back by then is in use by others."""
STILL_S: Seconds = 3.0
"""Time without a further return after which memory counts as returned."""
LOOK_S: Seconds = 0.5


def ran_out(error: BaseException) -> bool:
    """True if the error, or one of its causes, means that a device ran out of memory."""
    return any(isinstance(each, torch.OutOfMemoryError) for each in behind(error))


def free_memory() -> int | None:
    """Bytes that are free on this thread's device, for all processes; None if its kind does not report it."""
    accelerators.give_back_memory()
    said = getattr(accelerators.in_use(), "mem_get_info", None)
    return None if said is None else int(said()[0])


def await_return(
    free: Callable[[], int | None] = free_memory,
    *,
    now: Callable[[], Instant] = time.monotonic,
    pause: Callable[[Seconds], None] = time.sleep,
) -> int:
    """Wait until memory has come back and no more does, or for a minute; returns the bytes that came back.

    Returns at once if the device's kind does not report free memory.
    """
    first = free()
    if first is None:
        return 0
    most, begun = first, now()
    grown = begun
    while now() - begun < MOST_S and (most == first or now() - grown < STILL_S):
        pause(LOOK_S)
        found = free() or 0
        if found > most:
            most, grown = found, now()
    return most - first
