"""Orders regrow's work on protected state after work that the thread's current stream does not order: decision 0116."""

from collections.abc import Callable, Iterable, Mapping

import torch

from regrow.core.errors import RegrowError
from regrow.devices.accelerators import in_use, on_accelerator
from regrow.devices.stream_points import StreamPoint
from regrow.hydration.shards import local


class LateWork:
    """The script's own streams, and its copies into page-locked memory; none are known before `follow`."""

    def __init__(self) -> None:
        self._streams: list[torch.Stream] = []
        self._devices: set[torch.device] = set()
        self._arrives_late = False

    def follow(self, things: Iterable[object], tensors: Callable[[], Mapping[str, torch.Tensor]]) -> None:
        """From now on, wait for streams among these things, and for page-locked memory among the protected tensors."""
        if in_use() is None:
            return
        try:
            here = [local(each) for each in tensors().values()]
        except RegrowError:  # state that cannot be read is reported elsewhere
            here = []
        self._devices = {each.device for each in here if on_accelerator(each)}
        self._arrives_late = any(not on_accelerator(each) and each.is_pinned() for each in here)
        streams = (each for each in things if isinstance(each, torch.Stream))
        self._streams = list({(each.device, each.stream_id): each for each in streams}.values())

    def come_behind(self, tensors: Iterable[torch.Tensor] = ()) -> None:
        """Order all work that this thread enqueues from now on after the script's.

        Args:
            tensors: their devices are synchronized, so that unknown streams count too. Without them the host waits
                only if it could read page-locked memory too early.

        Raises the device's error if it has failed.
        """
        for stream in self._streams:
            torch.accelerator.current_stream(stream.device).wait_stream(stream)
        devices = {each.device for each in tensors if on_accelerator(each)}
        if devices or self._arrives_late:
            devices |= self._devices
        StreamPoint(devices).wait()  # polls: a wait in `synchronize` would keep a core busy
        for device in devices:
            torch.accelerator.synchronize(device)
