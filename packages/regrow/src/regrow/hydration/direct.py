"""One-sided reads: a newcomer reads a holder's memory itself; the holder only sends the addresses and checksums.

Two kinds: `memory`, of another process on the same machine by the kernel (one copy where a socket makes two), and
`nixl` (`nixl_reads`). If a read fails, the same bytes are requested over the socket, which also shows whether the
holder is alive. Bytes are used only once their checksum matched.
"""

import ctypes
import functools
import os
import socket
import struct
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from regrow.core.ids import Instant
from regrow.devices import nvidia
from regrow.hydration.memory import is_straight
from regrow.hydration.plan import SMALL_BYTES, Chunk

MEMORY, NIXL = "memory", "nixl"
_PLACE = struct.Struct(">Qq")
PLACE_BYTES = _PLACE.size
_PEER = struct.Struct("3i")
_IoVec = ctypes.c_size_t * 2
"""Address and length, as the kernel's `iovec`."""


class MemoryPlace(NamedTuple):
    """An address in a holder's memory, and the index of its accelerator (-1: host memory). Address 0 means nowhere."""

    address: int
    device: int = -1

    def pack(self) -> bytes:
        """The place as bytes, in the form in which it is sent."""
        return _PLACE.pack(*self)

    @classmethod
    def unpack(cls, data: bytes | bytearray) -> "MemoryPlace":
        """The place that the received bytes describe."""
        return cls(*_PLACE.unpack(data))


NOWHERE = MemoryPlace(0)
"""Place of bytes that are sent over the socket."""


def place_of(chunk: Chunk, tensor: Callable[[str], torch.Tensor], kind: str) -> MemoryPlace:
    """Place of a chunk for reads of kind `kind`; `NOWHERE` if it is small, or its bytes cannot be read in place."""
    name, offset, length = chunk[0]
    if not kind or len(chunk) > 1 or length < SMALL_BYTES or not is_straight(whole := tensor(name)):
        return NOWHERE
    if whole.device.type == "cpu":
        return MemoryPlace(whole.data_ptr() + offset)
    if kind == NIXL and nvidia.is_one(whole.device):
        return MemoryPlace(whole.data_ptr() + offset, whole.device.index or 0)
    return NOWHERE


class DirectReads(Protocol):
    """A newcomer's one-sided reads for one connection. Called by one thread at a time."""

    @property
    def kind(self) -> str:
        """Kind of the reads, `MEMORY` or `NIXL`."""
        ...

    def read(self, place: MemoryPlace, room: memoryview, until: Instant) -> None:
        """Fill `room` from `place`. After an `OSError` nothing is written into `room` any more."""
        ...


class MemoryReads:
    """Reads from the memory of a process on this machine, which the kernel allows to the same user.

    Args:
        pid: the process. If it has ended, or another process has its number now, the checksum does not match.
    """

    kind = MEMORY

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def read(self, place: MemoryPlace, room: memoryview, until: Instant) -> None:
        """Fill `room` from `place`; the kernel has finished when this returns. Raises `OSError`."""
        at, begin = 0, ctypes.addressof(ctypes.c_char.from_buffer(room))
        while at < len(room):
            mine, theirs = _IoVec(begin + at, len(room) - at), _IoVec(place.address + at, len(room) - at)
            count = _read_of_kernel()(self._pid, mine, 1, theirs, 1, 0)
            if count <= 0:
                number = ctypes.get_errno()
                raise OSError(number, f"the holder's memory cannot be read: {os.strerror(number)}")
            at += count


@functools.cache
def _read_of_kernel() -> Callable[..., int]:
    call = ctypes.CDLL(None, use_errno=True).process_vm_readv
    call.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]
    call.restype = ctypes.c_ssize_t
    return call


def pid_of_holder(sock: socket.socket) -> int:
    """Process that listens at the other end of a unix socket; 0 if it is not visible in this pid namespace."""
    return int(_PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))[0])
