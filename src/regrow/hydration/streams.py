"""Raw bytes and frames over a blocking socket, every wait bounded. Needs no torch: agents use it too."""

import socket
import struct
import time

import xxhash

from regrow.core.errors import DeadlineExceeded, ProtocolError
from regrow.core.ids import Instant, Seconds
from regrow.core.wire import MAX_FRAME_BYTES

DIGEST_BYTES = 8
STALL: Seconds = 5.0
"""A peer that moves no byte for this long is as good as dead."""
WINDOW = 1 << 20
STRANGERS_BYTES = 64 << 10
"""The longest frame of a peer that has not shown the job's token."""
_LENGTH = struct.Struct(">I")


def checksum(data: memoryview | bytes) -> bytes:
    """xxh3_64 of the bytes; runs without the interpreter lock."""
    return xxhash.xxh3_64_digest(data)


def allow(sock: socket.socket, deadline: Instant, *, stall: Seconds = STALL) -> None:
    """Let the next calls on the socket wait until the deadline, at most `stall`. Raises `DeadlineExceeded`."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise DeadlineExceeded("the deadline for moving state has passed")
    sock.settimeout(min(left, stall))


def receive_into(sock: socket.socket, room: memoryview) -> None:
    """Fill `room`. Raises `EOFError` when the peer closes before, `TimeoutError`, `OSError`."""
    at, size = 0, len(room)
    while at < size:
        count = sock.recv_into(room[at:])
        if not count:
            raise EOFError("the peer hung up")
        at += count


def read_frame(sock: socket.socket, most: int = MAX_FRAME_BYTES) -> bytearray | None:
    """The body of the next frame, of `most` bytes; None when the peer has closed between frames."""
    head = bytearray(_LENGTH.size)
    first = sock.recv_into(head)
    if not first:
        return None
    receive_into(sock, memoryview(head)[first:])
    (length,) = _LENGTH.unpack(head)
    if length > most:
        raise ProtocolError(f"a frame of {length} bytes was announced; the most is {most}")
    body = bytearray(length)
    receive_into(sock, memoryview(body))
    return body


def has_hung_up(sock: socket.socket) -> bool:
    """Whether the peer, from which nothing is expected now, has closed the connection."""
    try:
        return not sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except (BlockingIOError, TimeoutError):
        return False
    except OSError:
        return True


def hang_up(sock: socket.socket) -> None:
    """End the connection at once, also under a thread that is blocked in it; that thread closes it."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        # Not connected, or closed already: then nobody is blocked in it.
        return


def widen(sock: socket.socket) -> None:
    """Let the kernel take more at once: with unix sockets' default the two ends wait for each other too often."""
    if sock.family == socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, WINDOW)
    else:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
