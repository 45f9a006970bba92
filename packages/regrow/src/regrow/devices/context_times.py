"""Time that a process takes to initialize its accelerator, measured around the calls of torch that do it."""

import functools
import time
from collections.abc import Callable
from typing import Any

import torch

from regrow.core.ids import Seconds
from regrow.devices import accelerators


def time_context(took: Callable[[Seconds], None]) -> Callable[[], None]:
    """Call `took` with the seconds of each initialization of the accelerator, until the returned function is called."""
    if not (kind := accelerators.kind()):
        return lambda: None
    module, inside = torch.get_device_module(kind), False

    def timed(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        if inside:
            return call(*args, **kwargs)
        inside, since = True, time.monotonic()
        try:
            return call(*args, **kwargs)
        finally:
            inside = False
            took(time.monotonic() - since)

    names = ((module, "_lazy_init"), (module, "set_device"), (torch.accelerator, "set_device_index"))
    calls = [(place, name, getattr(place, name)) for place, name in names if hasattr(place, name)]
    for place, name, call in calls:
        setattr(place, name, functools.wraps(call)(functools.partial(timed, call)))

    def stop() -> None:
        for place, name, call in calls:
            if getattr(getattr(place, name), "__wrapped__", None) == call:  # only if the script has not replaced it
                setattr(place, name, call)

    return stop
