"""Enqueued work that the host does not wait for: a point in a device's work, and a number that is read behind it.

The host of a training under plain torch runs ahead of its device: it waits only for what it has to know. A host under
regrow does the same. A point says later whether the device has come that far; a number of the device is copied, in the
device's own order, into memory that the host can look into without waiting.
"""

import time
from collections.abc import Callable, Iterable, Sequence

import torch

from regrow.core.ids import Seconds
from regrow.devices.accelerators import host_memory, is_capturing, on_accelerator

_PART = 0.01
"""Pause between two looks of a waiter, as a part of its wait so far: short waits stay short, long ones cost nothing.

It sleeps meanwhile: a wait in the driver spins, keeps a core busy, and looks like work.
"""
_NEAR, _NEAR_PART = 0.1, 0.001
"""Within the first part before and after the expected end of a wait, pauses are the second part of it."""
_PAUSE_LEAST, _PAUSE_MOST = Seconds(50e-6), Seconds(0.01)


class StreamPoint:
    """A point in what this thread has enqueued on its current streams of some devices.

    Args:
        devices: accelerators; of none the point is passed at once.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._events: list[torch.Event] = []
        for device in devices:
            event = torch.Event(device)
            event.record(torch.accelerator.current_stream(device))
            self._events.append(event)

    def passed(self) -> bool:
        """True if all that was enqueued before it is done. Raises the device's error if it has failed."""
        while self._events:
            if not self._events[-1].query():
                return False
            self._events.pop()
        return True

    def hold(self, stream: torch.Stream) -> None:
        """Let what is enqueued on another stream from now on come behind it."""
        for event in tuple(self._events):
            event.wait(stream)

    def wait(self, meanwhile: Callable[[], object] = lambda: None, *, usual: Seconds = 0.0) -> Seconds:
        """Return how long it took when it is passed, as late as the device's own work is. Raises what `passed` does.

        Args:
            meanwhile: called at each look.
            usual: how long waits like this one take; 0: not known.
        """
        begun, waited = time.monotonic(), 0.0
        near, past = (1 - _NEAR) * usual, (1 + _NEAR) * usual
        while not self.passed():
            meanwhile()
            waited = time.monotonic() - begun
            pause = (_NEAR_PART if near <= waited <= past else _PART) * waited
            if waited < near < waited + pause:
                pause = near - waited
            # Hundreds of these in a wait: comparisons are cheaper than calls.
            time.sleep(_PAUSE_LEAST if pause < _PAUSE_LEAST else _PAUSE_MOST if pause > _PAUSE_MOST else pause)
        return waited


class LateNumber:
    """A number as it is on its device where it is logged, read once the device has come there.

    Args:
        tensor: with one element, on an accelerator.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._version = tensor, _version(tensor)
        self._here = host_memory((), tensor.dtype, tensor.device)
        with torch.no_grad():
            self._here.copy_(tensor.reshape(()), non_blocking=True)
        self._point = StreamPoint([tensor.device])

    def is_of(self, tensor: torch.Tensor) -> bool:
        """True if it is the number that the tensor has now."""
        return tensor is self._tensor and _version(tensor) == self._version

    def known(self) -> bool:
        """True if it can be read at once. Raises the device's error if it has failed."""
        return self._point.passed()

    def value(self) -> float:
        """The number; it is waited for. Raises what `known` does."""
        self._point.wait()
        return float(self._here)


class LateBytes:
    """Bytes of tensors as they are on their devices where this is made, read once the devices have come there.

    Args:
        pieces: in one dimension, of uint8. Those in the processor's memory are copied too if any is not there: what
            comes next may write to them (Adam's count of steps is such a one).
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
        """True if they can be read at once. Raises the device's error if it has failed."""
        return self._point.passed()

    def read(self) -> list[memoryview]:
        """The bytes of each piece; they are waited for. Raises what `known` does."""
        self._point.wait()
        return [each.numpy().data for each in self._here]


def late(tensor: torch.Tensor) -> bool:
    """True if its number can be copied as `LateNumber` does: the stream's work is not being captured for a graph.

    A tensor of a kind of its own (`DTensor`) knows best how it becomes a number.
    """
    return type(tensor) is torch.Tensor and not is_capturing(tensor.device)


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
