"""The one seam to what a device still has to do: a step is not ready while its gradients are only on their way.

On a processor an operation is done when its call returns. On an accelerator it is only enqueued: a collective's
`wait()` lets the stream wait, not the program, and after an abort the kernels behind it run on partial sums.
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
    """Processor or device that computes the gradients."""

    enqueues: bool
    """True if work may still be under way when its call has returned, so that an abort may have cut it off unseen."""

    def wait(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Return when all that was enqueued for the gradients is done; until then `meanwhile` is called now and then.

        Raises `RuntimeError` where it has failed.
        """
        ...

    def point(self) -> StreamPoint:
        """The point to which this thread has enqueued by now."""
        ...


class Processor:
    """Nothing is ever under way."""

    enqueues = False

    def wait(self, meanwhile: Callable[[], object] = lambda: None) -> None:
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
        self._took: deque[Seconds] = deque(maxlen=2)

    def wait(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        """All work on each device's current stream has been done; the wait is shown as one for the device.

        Others may have to be asked why it does not end.
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
