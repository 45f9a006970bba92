"""Enqueued work that the host does not wait for: a point in a device's work, and a number that is read after it.

The host of a training under plain torch runs ahead of its device: it waits only for values that it needs. A host under
regrow does the same. A point shows later whether the device has reached it; a number on the device is copied, in the
device's own order, into memory that the host can read without waiting.
"""

import time
from collections.abc import Callable, Iterable, Sequence

import torch

from regrow.core.ids import Seconds
from regrow.devices.accelerators import host_memory, is_capturing, on_accelerator

_PART = 0.01
"""Pause between two looks of a waiter, as a fraction of its wait so far: short waits stay short, long ones are cheap.

The waiter sleeps meanwhile: a wait in the driver spins, keeps a core busy, and looks like work.
"""
_NEAR, _NEAR_PART = 0.1, 0.001
"""Pauses near the expected end of a wait: within the first fraction of it, they are the second fraction of it."""
_PAUSE_LEAST, _PAUSE_MOST = Seconds(50e-6), Seconds(0.01)


class StreamPoint:
    """A point in the work that this thread has enqueued on its current streams of some devices.

    Args:
        devices: accelerators; without any, the point is passed at once.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._events: list[torch.Event] = []
        for device in devices:
            event = torch.Event(device)
            event.record(torch.accelerator.current_stream(device))
            self._events.append(event)

    def passed(self) -> bool:
        """True if all work that was enqueued before the point is done. Raises the device's error if it has failed."""
        while self._events:
            if not self._events[-1].query():
                return False
            self._events.pop()
        return True

    def hold(self, stream: torch.Stream) -> None:
        """Make later work on another stream wait for this point."""
        for event in tuple(self._events):
            event.wait(stream)

    def wait(self, meanwhile: Callable[[], object] = lambda: None, *, usual: Seconds = 0.0) -> Seconds:
        """Wait until the point is passed; returns the seconds waited. Raises the device's error if it has failed.

        Args:
            meanwhile: called at each look.
            usual: usual duration of such a wait; 0: not known.
        """
        begun, waited = time.monotonic(), 0.0
        near, past = (1 - _NEAR) * usual, (1 + _NEAR) * usual
        while not self.passed():
            meanwhile()
            waited = time.monotonic() - begun
            pause = (_NEAR_PART if near <= waited <= past else _PART) * waited
            if waited < near < waited + pause:
                pause = near - waited
            # A wait has hundreds of these: comparisons are cheaper than calls.
            time.sleep(_PAUSE_LEAST if pause < _PAUSE_LEAST else _PAUSE_MOST if pause > _PAUSE_MOST else pause)
        return waited


class LateNumber:
    """A number on a device, with its value at this point of the device's work; read once the device has reached it.

    Args:
        tensor: tensor with one element, on an accelerator.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._version = tensor, _version(tensor)
        self._here = host_memory((), tensor.dtype, tensor.device)
        with torch.no_grad():
            self._here.copy_(tensor.reshape(()), non_blocking=True)
        self._point = StreamPoint([tensor.device])

    def is_of(self, tensor: torch.Tensor) -> bool:
        """True if this object was made from `tensor`, and the tensor was not changed since."""
        return tensor is self._tensor and _version(tensor) == self._version

    def known(self) -> bool:
        """True if the number can be read at once. Raises the device's error if it has failed."""
        return self._point.passed()

    def value(self) -> float:
        """Wait for the number, and return it. Raises the device's error if it has failed."""
        self._point.wait()
        return float(self._here)


class LateBytes:
    """Bytes of tensors on devices, as they are at this point of the devices' work; read once these have reached it.

    Args:
        pieces: tensors in one dimension, of uint8. If any is on a device, those in host memory are copied too, since
            later code may write to them (such as Adam's step counter).
    """

    def __init__(self, pieces: Sequence[torch.Tensor]) -> None:
        self._here: list[torch.Tensor] = []
        mixed = any(on_accelerator(piece) for piece in pieces)
        devices: list[torch.device] = []
        for piece in pieces:
            if not on_accelerator(piece):
                self._here.append(piece.clone() if mixed else piece)
                continue
            devices.append(piece.device)
            room = host_memory(piece.shape, piece.dtype, piece.device)
            self._here.append(room.copy_(piece, non_blocking=True))
        self._point = StreamPoint(dict.fromkeys(devices))

    def known(self) -> bool:
        """True if the bytes can be read at once. Raises the device's error if it has failed."""
        return self._point.passed()

    def read(self) -> list[memoryview]:
        """Wait for the bytes, and return those of each piece. Raises the device's error if it has failed."""
        self._point.wait()
        return [each.numpy().data for each in self._here]


def late(tensor: torch.Tensor) -> bool:
    """True if `LateNumber` can copy the tensor's number: the stream's work is not being captured for a graph.

    False for a tensor subclass (`DTensor`), which has its own way to become a number.
    """
    return type(tensor) is torch.Tensor and not is_capturing(tensor.device)


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
