"""Time in which a process takes its accelerator into use, measured around the calls of torch that do it."""

import functools
import time
from collections.abc import Callable
from typing import Any

import torch

from regrow.core.ids import Seconds
from regrow.devices import accelerators

_OF_MODULE = ("_lazy_init", "set_device")
_OF_TORCH = ("set_device_index",)


class ContextClock:
    """Measures from now on, until `stop`.

    Args:
        took: told the seconds of each call; a call within another is part of that.
    """

    def __init__(self, took: Callable[[Seconds], None]) -> None:
        self._took, self._inside = took, False
        self._before: list[tuple[Any, str, Any]] = []
        if not (kind := accelerators.kind()):
            return
        for place, names in ((torch.get_device_module(kind), _OF_MODULE), (torch.accelerator, _OF_TORCH)):
            for name in names:
                if (call := getattr(place, name, None)) is not None:
                    self._before.append((place, name, call))
                    setattr(place, name, self._timed(call))

    def stop(self) -> None:
        """Put back what was there, but where the script has put something of its own."""
        for place, name, call in self._before:
            if getattr(getattr(place, name, None), "__wrapped__", None) == call:
                setattr(place, name, call)
        self._before.clear()

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._inside or not self._before:
                return call(*args, **kwargs)
            self._inside, since = True, time.monotonic()
            try:
                return call(*args, **kwargs)
            finally:
                self._inside = False
                self._took(time.monotonic() - since)

        return timed
