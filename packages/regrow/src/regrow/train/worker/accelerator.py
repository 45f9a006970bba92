"""The one seam to what a device still has to do: a step is not ready while its gradients are only on their way.

On a processor an operation is done when its call returns. On an accelerator it is only enqueued: a collective's
`wait()` lets the stream wait, not the program, and after an abort the kernels behind it run on partial sums.
"""

import time
from collections.abc import Iterable
from typing import Protocol

import torch

from regrow.comm.flight import FLIGHT
from regrow.core.ids import Seconds
from regrow.core.messages.sights import DEVICE
from regrow.devices.accelerators import on_accelerator
from regrow.devices.stream_points import StreamPoint

_PART = 0.01
"""Pause between two looks, as a part of the wait until then: short waits stay short, long ones cost nothing."""
_PAUSE_LEAST, _PAUSE_MOST = Seconds(50e-6), Seconds(0.01)


class Accelerator(Protocol):
    """Processor or device that computes the gradients."""

    enqueues: bool
    """True if work may still be under way when its call has returned, so that an abort may have cut it off unseen."""

    def wait(self) -> None:
        """Return when all that was enqueued for the gradients is done. Raises `RuntimeError` where it has failed."""
        ...

    def point(self) -> StreamPoint:
        """The point to which this thread has enqueued by now."""
        ...


class Processor:
    """Nothing is ever under way."""

    enqueues = False

    def wait(self) -> None:
        """Nothing to wait for."""

    def point(self) -> StreamPoint:
        """A point that is passed."""
        return StreamPoint([])


class Devices:
    """Accelerators of any kind, each with the stream that the script computes on.

    Args:
        devices: those that have protected tensors.
    """

    enqueues = True

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._devices = list(devices)

    def wait(self) -> None:
        """An event on each device's current stream has come: all work before it is done.

        Asked for and slept between: a wait in the driver spins, and who spins looks as if it computed. It is shown as
        a wait for the device, since others may have to be asked why it does not end.
        """
        events = []
        for device in self._devices:
            event = torch.Event(device)
            event.record(torch.accelerator.current_stream(device))
            events.append(event)
        if all(event.query() for event in events):
            return
        FLIGHT.name(DEVICE)
        flight, begun = FLIGHT.begin(), time.monotonic()
        try:
            for event in events:
                while not event.query():
                    time.sleep(min(max(_PART * (time.monotonic() - begun), _PAUSE_LEAST), _PAUSE_MOST))
        finally:
            FLIGHT.end(flight)

    def point(self) -> StreamPoint:
        """A point in the current stream of each device."""
        return StreamPoint(self._devices)


def accelerator_of(tensors: Iterable[torch.Tensor]) -> Accelerator:
    """The accelerator that computes on these tensors."""
    devices = sorted({str(tensor.device) for tensor in tensors if on_accelerator(tensor)})
    return Devices(torch.device(device) for device in devices) if devices else Processor()
