"""Garbage collection of the coordinator's process in quiet times, not while thousands of agents hear of a fault.

A full collection stops everything for a third of a second at 5,000 agents, and the messages of one fault cause two.
"""

import asyncio
import gc
from collections.abc import Callable

from regrow.core.ids import Seconds

_EVERY: Seconds = 5.0
_PUT_OFF = 12
"""Times that it is put off while there is no quiet moment."""
_RARELY = 1_000
"""Collections of younger objects before a full one comes by itself: memory stays bounded."""


class QuietCollections:
    """`with` it, in a process that hosts a coordinator, inside its event loop.

    Args:
        quiet: whether nothing is going on, so that a pause costs nobody anything.
        every: seconds between two looks.
    """

    def __init__(self, quiet: Callable[[], bool], *, every: Seconds = _EVERY) -> None:
        self._quiet = quiet
        self._every = every
        self._usual = gc.get_threshold()
        self._put_off = 0
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> None:
        """From now on; what there is already is looked through no more."""
        self._usual = gc.get_threshold()
        gc.freeze()
        gc.set_threshold(*self._usual[:2], max(_RARELY, self._usual[2]))
        self._next()

    def __exit__(self, *_: object) -> None:
        """As it was."""
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
