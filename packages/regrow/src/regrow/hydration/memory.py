"""The bytes of tensors: in place if a tensor is contiguous in host memory, staged otherwise.

The order of bytes is that of the contiguous tensor, whatever the strides on either side.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from regrow.devices.accelerators import host_memory, is_accelerator, stream_of_its_own
from regrow.devices.stream_points import StreamPoint
from regrow.hydration.plan import ByteSpan, Chunk, chunked

BUFFERS = 3
"""Number of chunks of a device in flight at once: one is sent while the next ones are read."""
BUFFER_BYTES = 8 << 20
"""Size of the page-locked buffers for copies from a device; a power of two, as torch makes them anyway."""


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as a tensor of its bytes, on its device, without a copy."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def is_straight(tensor: torch.Tensor) -> bool:
    """True if the bytes in the tensor's memory are the bytes that are sent."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _stage(size: int, device: torch.device | None) -> torch.Tensor:
    return host_memory((size,), torch.uint8, device)


def bytes_of(tensor: torch.Tensor, span: ByteSpan) -> torch.Tensor:
    """The bytes `span` of a tensor, on its device. If it is not contiguous, only the rows with these bytes are copied.

    A copy of the whole tensor would otherwise be made for each request of each connection.
    """
    tensor, (_, offset, length) = tensor.detach(), span
    while not is_straight(tensor) and tensor.dim():
        row = tensor.nbytes // len(tensor)
        first, last = offset // row, (offset + length - 1) // row
        offset -= first * row
        if first < last or tensor.dim() == 1:
            tensor = tensor[first : last + 1]
            break
        tensor = tensor[first]
    flat = _flat(tensor.resolve_conj().resolve_neg().contiguous())
    return flat[offset : offset + length]


class Outgoing:
    """Reads chunks from tensors, for one connection.

    Bytes on a device are read on a stream of this reader's own: on the script's stream the read would wait for all work
    that the script has enqueued. Several buffers are filled in turn, so that one is read while another is sent.

    Args:
        tensor: finds a tensor by name.
        size: most bytes in a chunk.
        behind: point in the devices' work after which the tensors do not change; None: read on the current stream.
    """

    def __init__(self, tensor: Callable[[str], torch.Tensor], size: int, behind: StreamPoint | None = None) -> None:
        self._tensor = tensor
        self._size = size
        self._behind = behind
        self._stages: dict[tuple[int, bool], torch.Tensor] = {}
        self._streams: dict[torch.device, torch.Stream | None] = {}

    def read_all(self, chunks: Iterable[Chunk]) -> Iterator[memoryview]:
        """Yield the bytes of each chunk, valid until the next chunk is requested. Raises errors of the device."""
        begun: deque[_Begun] = deque()
        for number, chunk in enumerate(chunks):
            begun.append(self._begin(chunk, number % BUFFERS))
            if len(begun) == BUFFERS:
                yield begun.popleft().wait()
        while begun:
            yield begun.popleft().wait()

    def _begin(self, chunk: Chunk, buffer: int) -> "_Begun":
        devices = list(dict.fromkeys(d for span in chunk if is_accelerator(d := self._tensor(span.name).device)))
        with contextlib.ExitStack() as streams:
            for device in devices:
                if (stream := self._stream(device)) is not None:
                    streams.enter_context(stream)
            if len(chunk) == 1 and not devices:
                return _Begun(bytes_of(self._tensor(chunk[0].name), chunk[0]))
            at = 0
            stage = self._staging(buffer, devices[0] if devices else None)
            for span in chunk:
                stage[at : at + span.length].copy_(bytes_of(self._tensor(span.name), span), non_blocking=True)
                at += span.length
            return _Begun(stage[:at], StreamPoint(devices))

    def _stream(self, device: torch.device) -> torch.Stream | None:
        if self._behind is None:
            return None
        if device not in self._streams:
            stream = self._streams[device] = stream_of_its_own(device)
            if stream is not None:
                self._behind.hold(stream)
        return self._streams[device]

    def _staging(self, buffer: int, device: torch.device | None) -> torch.Tensor:
        """The buffer with this number, page-locked if it is for a device."""
        key = buffer, device is not None
        if key not in self._stages:
            self._stages[key] = _stage(self._size, device)
        return self._stages[key]


class _Begun:
    """A chunk whose bytes are being copied from a device."""

    def __init__(self, data: torch.Tensor, point: StreamPoint | None = None) -> None:
        self._data, self._point = data, point

    def wait(self) -> memoryview:
        if self._point is not None:
            self._point.wait()
        return self._data.numpy().data


def copy_from_devices(tensor: Callable[[str], torch.Tensor], rooms: Mapping[str, torch.Tensor]) -> None:
    """Copy tensors of devices, which must not change meanwhile, into ordinary memory.

    They come through a few page-locked buffers, one of which is emptied while the next are filled, so the host waits
    once for the device's earlier work, and not for each tensor. Raises the device's error.

    Args:
        tensor: finds a tensor by name.
        rooms: for each tensor's name its destination, as bytes in one dimension.
    """
    chunks = chunked([ByteSpan(name, 0, room.nbytes) for name, room in rooms.items() if room.nbytes], BUFFER_BYTES)
    for chunk, data in zip(chunks, Outgoing(tensor, BUFFER_BYTES).read_all(chunks), strict=True):
        at = 0
        for name, offset, length in chunk:
            arrived = torch.frombuffer(data, dtype=torch.uint8, count=length, offset=at)
            rooms[name][offset : offset + length] = arrived
            at += length


class Incoming:
    """Destination of arriving bytes. One exists for a whole hydration; each connection has a `Landing` in it.

    Args:
        targets: the tensors to fill. Arriving bytes are written only after the device work that this thread has
            enqueued on its current streams.
    """

    def __init__(self, targets: dict[str, torch.Tensor]) -> None:
        self._crooked = {name: tensor for name, tensor in targets.items() if not is_straight(tensor)}
        self._straightened = {
            name: torch.empty_like(tensor, memory_format=torch.contiguous_format)
            for name, tensor in self._crooked.items()
        }
        self._flat = {name: _flat(self._straightened.get(name, tensor)) for name, tensor in targets.items()}
        devices = {flat.device for flat in self._flat.values()}
        self._behind = StreamPoint(device for device in devices if is_accelerator(device))

    def flat(self, name: str) -> torch.Tensor:
        """The bytes of a tensor, on its device, into which arriving bytes are written."""
        return self._flat[name]

    def stream(self, device: torch.device) -> torch.Stream | None:
        """A new stream for copies to the device; None if this kind of device has only one."""
        stream = stream_of_its_own(device)
        if stream is not None:
            self._behind.hold(stream)
        return stream

    def copy_straightened(self) -> None:
        """After everything has arrived, copy the tensors that could not be received in place."""
        with torch.no_grad():
            for name, tensor in self._crooked.items():
                tensor.copy_(self._straightened[name])


class Landing:
    """Writes chunks of one connection into the tensors of an `Incoming`.

    Chunks for a device are copied there on a stream of this connection's own, from several buffers in turn, so that a
    chunk is received and checked while earlier ones are copied.
    """

    def __init__(self, incoming: Incoming, size: int) -> None:
        self._incoming = incoming
        self._size = size
        self._stages: dict[tuple[int, bool], torch.Tensor] = {}
        self._streams: dict[torch.device, torch.Stream | None] = {}
        self._under_way: deque[StreamPoint] = deque()
        self._landed = 0
        self._stage: torch.Tensor | None = None

    def room(self, chunk: Chunk) -> memoryview:
        """Memory for a chunk; call `land` when it has arrived and its checksum matches. Raises errors of the device."""
        first = self._incoming.flat(chunk[0].name)
        if len(chunk) == 1 and first.device.type == "cpu":
            _, offset, length = chunk[0]
            return first[offset : offset + length].numpy().data
        if len(self._under_way) == BUFFERS:
            self._under_way.popleft().wait()
        devices = self._devices(chunk)
        key = self._landed % BUFFERS, bool(devices)
        if key not in self._stages:
            self._stages[key] = _stage(self._size, devices[0] if devices else None)
        self._stage = self._stages[key]
        return self._stage[: sum(span.length for span in chunk)].numpy().data

    def land(self, chunk: Chunk) -> None:
        """Begin to copy a staged chunk to its tensors; does nothing for a chunk that was received in place."""
        if len(chunk) == 1 and self._incoming.flat(chunk[0].name).device.type == "cpu":
            return
        if self._stage is None:
            raise RuntimeError("land() before room()")
        devices, at = self._devices(chunk), 0
        with contextlib.ExitStack() as streams:
            for device in devices:
                if device not in self._streams:
                    self._streams[device] = self._incoming.stream(device)
                if (stream := self._streams[device]) is not None:
                    streams.enter_context(stream)
            for name, offset, length in chunk:
                staged = self._stage[at : at + length]
                self._incoming.flat(name)[offset : offset + length].copy_(staged, non_blocking=True)
                at += length
            self._under_way.append(StreamPoint(devices))
        self._landed += 1

    def await_landed(self) -> None:
        """Wait until all landed chunks are in their tensors. Raises errors of the device."""
        while self._under_way:
            self._under_way.popleft().wait()

    def _devices(self, chunk: Chunk) -> list[torch.device]:
        devices = (self._incoming.flat(span.name).device for span in chunk)
        return list(dict.fromkeys(device for device in devices if is_accelerator(device)))
