"""Recognizes a worker that waits for its device although it looks busy: no progress, but the device still has work.

A thread that waits in a driver spins, like one that computes on the processor. Only the device can tell the difference:
a separate thread asks it once the worker has shown no progress for long. It does not ask earlier, because that would
break a graph that another thread records, and a wait in the driver uses a core.
"""

import threading
from collections.abc import Callable

import torch

from regrow.comm.flight import FLIGHT, Flights
from regrow.core.ids import Instant, Seconds
from regrow.core.messages.observations import DEVICE

STILL_S: Seconds = 30.0
"""Time without progress after which the device is asked, and interval between two such requests."""
SHOWN_AFTER_S: Seconds = 10.0
"""Time that a device has to finish before it is shown as waited for; even a full queue takes less."""


class DeviceWaits:
    """The waits for devices in one process.

    Args:
        flights: shows the waits to the agent.
        finish: returns when a device has done all its enqueued work.
    """

    def __init__(self, flights: Flights, finish: Callable[[torch.device], None]) -> None:
        self._flights, self._finish = flights, finish
        self.body_beats: Callable[[], int | None] = lambda: None
        """A number that grows with each sign of progress; None while the training thread is not in a step's body."""
        self._device: torch.device | None = None
        self._seen: int | None = None
        self._since: Instant = 0.0
        self._asking: threading.Thread | None = None
        self._shown: int | None = None

    def enqueues(self, device: torch.device | None) -> None:
        """Note that a collective is about to be enqueued on this device."""
        self._device = device
        self._flights.begin_unseen()

    def look(self, now: Instant) -> None:
        """Ask the device if that is due, and show the answer; called about each second, always by the same thread."""
        beats = self.body_beats()
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
        elif (
            beats is not None
            and now - self._since >= STILL_S
            and self._device is not None
            and self._flights.only_unseen
        ):
            asked = threading.Thread(target=self._ask, args=(self._device,), name="regrow-device-waits", daemon=True)
            self._asking = asked
            asked.start()

    def _ask(self, device: torch.device) -> None:
        unseen = self._flights.unseen
        try:
            self._finish(device)
        except RuntimeError:
            return  # the training thread's next call raises the device's error too, and reports it
        self._flights.end_unseen(unseen)

    def _hide(self) -> None:
        if self._shown is not None:
            shown, self._shown = self._shown, None
            self._flights.end(shown)


WAITS = DeviceWaits(FLIGHT, torch.accelerator.synchronize)
"""The waits of this process."""
