"""Garbage collection of the coordinator's process in quiet times, and not while thousands of agents handle a fault.

A full collection stops the process for a third of a second at 5,000 agents, and the messages of one fault cause two.
"""

import asyncio
import gc
from collections.abc import Callable

from regrow.core.ids import Seconds

_EVERY: Seconds = 5.0
_PUT_OFF = 12
"""Most times that a collection is put off because there is no quiet moment."""
_RARELY = 1_000
"""Number of collections of younger objects before Python starts a full one by itself, which bounds the memory."""


class QuietCollections:
    """Context manager for a process that hosts a coordinator, entered inside its event loop.

    Args:
        quiet: returns True if nothing is going on, so that a pause does no harm.
        every: seconds between two checks.
    """

    def __init__(self, quiet: Callable[[], bool], *, every: Seconds = _EVERY) -> None:
        self._quiet = quiet
        self._every = every
        self._usual = gc.get_threshold()
        self._put_off = 0
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> None:
        """Begin to collect in quiet times; objects that exist already are exempt from collection."""
        self._usual = gc.get_threshold()
        gc.freeze()
        gc.set_threshold(*self._usual[:2], max(_RARELY, self._usual[2]))
        self._next()

    def __exit__(self, *_: object) -> None:
        """Restore the former settings of the garbage collector."""
        if self._timer is not None:
            self._timer.cancel()
        gc.set_threshold(*self._usual)
        gc.unfreeze()

    def _next(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._every, self._look)

    def _look(self) -> None:
        if gc.get_count()[2] > self._usual[2]:
            if self._quiet() or self._put_off >= _PUT_OFF:
                self._put_off = 0
                gc.collect()
            else:
                self._put_off += 1
        self._next()
