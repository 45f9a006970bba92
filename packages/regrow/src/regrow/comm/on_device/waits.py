"""Shows that a worker's device still has work while its thread stands still: then it waits, though it looks busy.

A thread that waits in a driver spins, as one that computes on the processor does. Only the device knows which it is:
it is asked, by a thread of its own, once the worker has shown no progress for long. It is not asked earlier, as a graph
that another thread records does not bear it, and a wait in the driver takes a core.
"""

import threading
from collections.abc import Callable

import torch

from regrow.comm.flight import FLIGHT, Flights
from regrow.core.ids import Instant, Seconds
from regrow.core.messages.observations import DEVICE

STILL_S: Seconds = 30.0
"""Standstill after which the device is asked, and time between two questions."""
SHOWN_AFTER_S: Seconds = 10.0
"""Time for a device to come to its end before it is shown as waited for: a full queue takes less."""


class DeviceWaits:
    """Of one process.

    Args:
        flights: where the waits are shown.
        finish: returns when a device has done all that it was given.
    """

    def __init__(self, flights: Flights, finish: Callable[[torch.device], None]) -> None:
        self._flights, self._finish = flights, finish
        self.standing: Callable[[], int | None] = lambda: None
        """Grows with each sign of progress; None while the thread that trains is not in a step's body."""
        self._device: torch.device | None = None
        self._seen: int | None = None
        self._since: Instant = 0.0
        self._asking: threading.Thread | None = None
        self._shown: int | None = None

    def enqueues(self, device: torch.device | None) -> None:
        """A collective is about to be enqueued there."""
        self._device = device
        self._flights.lose_sight()

    def look(self, now: Instant) -> None:
        """Ask if it is time, and show the answer; called about each second, always by the same thread."""
        beats = self.standing()
        if beats != self._seen:
            self._seen, self._since = beats, now
            self._hide()
        if self._asking is not None:
            if not self._asking.is_alive():
                self._asking, self._since = None, now
                self._hide()
            elif self._shown is None and beats is not None and now - self._since >= STILL_S + SHOWN_AFTER_S:
                self._flights.name(DEVICE)
                self._shown = self._flights.begin()
        elif beats is not None and now - self._since >= STILL_S and self._device is not None and self._flights.lost:
            asked = threading.Thread(target=self._ask, args=(self._device,), name="regrow-device-waits", daemon=True)
            self._asking = asked
            asked.start()

    def _ask(self, device: torch.device) -> None:
        unseen = self._flights.unseen
        try:
            self._finish(device)
        except RuntimeError:
            return  # the device's error is told by the thread that trains, whose next call raises it too
        self._flights.regain_sight(unseen)

    def _hide(self) -> None:
        if self._shown is not None:
            shown, self._shown = self._shown, None
            self._flights.end(shown)


WAITS = DeviceWaits(FLIGHT, torch.accelerator.synchronize)
"""Of this process."""
