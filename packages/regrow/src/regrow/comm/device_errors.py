"""Errors that a device's groups see by themselves: a link that flaps, a lost port, a peer's end.

The thread that trains may wait for the device meanwhile, which never comes to its end: so another one asks.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from regrow.core.ids import Seconds

ASK_S: Seconds = 1.0
"""How often they are asked."""


class Asked(Protocol):
    """What runs the collectives of one group on a device."""

    @property
    def aborting(self) -> bool:
        """Whether it was given up."""
        ...

    def error(self) -> str:
        """Its error; empty for none."""
        ...


class DeviceErrors:
    """Asks the groups of this process, from a thread that begins with the first one.

    Args:
        living: those that stand now.
    """

    def __init__(self, living: Sequence[Asked]) -> None:
        self._living = living
        self.tell: Callable[[str], None] | None = None
        """Told an error that no abort of ours has made; once for each group. From a thread of its own."""
        self._told: list[Asked] = []
        self._asking: threading.Thread | None = None

    def watch(self) -> None:
        """There is a group."""
        if self._asking is None:
            self._asking = threading.Thread(target=self._ask_always, name="regrow-device-errors", daemon=True)
            self._asking.start()

    def ask(self) -> None:
        """Look at all of them once."""
        living = list(self._living)
        self._told = [each for each in self._told if each in living]
        for each in living:
            if each in self._told or each.aborting:
                continue
            error = each.error()
            if error and self.tell is not None:
                self._told.append(each)
                self.tell(error)

    def _ask_always(self) -> None:
        pause = threading.Event()
        while not pause.wait(ASK_S):
            self.ask()
