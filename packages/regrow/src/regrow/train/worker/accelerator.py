"""Waits for work that is enqueued on a device: a step is not ready before its gradients are computed.

On a CPU an operation is done when its call returns. On an accelerator it is only enqueued: a collective's
`wait()` makes the stream wait, not the program, and after an abort the kernels after it run on partial sums.
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from regrow.comm.flight import FLIGHT
from regrow.core.ids import Seconds
from regrow.core.messages.observations import DEVICE
from regrow.devices.accelerators import on_accelerator
from regrow.devices.stream_points import StreamPoint


class Accelerator(Protocol):
    """The CPU or the device that computes the gradients."""

    enqueues: bool
    """True if work may still be under way when its call has returned, so that an abort may have cut it off unseen."""

    def wait(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Return when all work enqueued for the gradients is done; until then `meanwhile` is called now and then.

        Raises `RuntimeError` if the device has failed.
        """
        ...

    def point(self) -> StreamPoint:
        """The point after all work that this thread has enqueued by now."""
        ...


class Processor:
    """The CPU, on which an operation is complete when its call returns."""

    enqueues = False

    def wait(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Return at once."""

    def point(self) -> StreamPoint:
        """A point that is passed already."""
        return StreamPoint([])


class Devices:
    """Accelerators of any kind, each with the stream on which the script computes.

    Args:
        devices: the devices that have protected tensors.
    """

    enqueues = True

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._devices = list(devices)
        self._took: deque[Seconds] = deque(maxlen=2)

    def wait(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Wait for all work on each device's current stream; shown to the agent as a wait for the device.

        If it does not end, the cause may be found on other ranks.
        """
        point = self.point()
        if point.passed():
            return
        FLIGHT.name(DEVICE)
        flight = FLIGHT.begin()
        try:
            took = point.wait(meanwhile, usual=min(self._took, default=0.0))
        finally:
            FLIGHT.end(flight)
        self._took.append(took)

    def point(self) -> StreamPoint:
        """A point in the current stream of each device."""
        return StreamPoint(self._devices)


def accelerator_of(tensors: Iterable[torch.Tensor]) -> Accelerator:
    """The accelerator that computes on these tensors."""
    devices = sorted({str(tensor.device) for tensor in tensors if on_accelerator(tensor)})
    return Devices(torch.device(device) for device in devices) if devices else Processor()
