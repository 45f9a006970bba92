"""Work on protected state that the thread's current stream does not order: see decision 0116."""

from collections.abc import Callable, Iterable, Mapping

import torch

from regrow.core.errors import RegrowError
from regrow.devices.accelerators import in_use, on_accelerator
from regrow.devices.stream_points import StreamPoint
from regrow.hydration.shards import local


class LateWork:
    """The script's own streams, and its copies into page-locked memory; nothing is known of them before `follow`."""

    def __init__(self) -> None:
        self._streams: list[torch.Stream] = []
        self._devices: set[torch.device] = set()
        self._arrives_late = False

    def follow(self, things: Iterable[object], tensors: Callable[[], Mapping[str, torch.Tensor]]) -> None:
        """From now on streams among these things count, and page-locked memory among the protected tensors."""
        if in_use() is None:
            return
        try:
            here = [local(each) for each in tensors().values()]
        except RegrowError:  # of state that cannot be told: that is said elsewhere
            here = []
        self._devices = {each.device for each in here if on_accelerator(each)}
        self._arrives_late = any(not on_accelerator(each) and each.is_pinned() for each in here)
        streams = (each for each in things if isinstance(each, torch.Stream))
        self._streams = list({(each.device, each.stream_id): each for each in streams}.values())

    def come_behind(self, tensors: Iterable[torch.Tensor] = ()) -> None:
        """Let all that this thread enqueues from now on come behind it.

        Args:
            tensors: all of their devices is waited for, so that streams that nobody knows count too. The host waits
                otherwise only where it could read page-locked memory too early.

        Raises the device's error if it has failed.
        """
        for stream in self._streams:
            torch.accelerator.current_stream(stream.device).wait_stream(stream)
        devices = {each.device for each in tensors if on_accelerator(each)}
        if devices or self._arrives_late:
            devices |= self._devices
        StreamPoint(devices).wait()  # asked for, not slept in, as far as the streams are known
        for device in devices:
            torch.accelerator.synchronize(device)
