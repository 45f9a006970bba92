"""Transfer of state over a blocking socket, with a limit on every wait. Needs no torch: agents use it too."""

import select
import socket
import time

import xxhash

from regrow.core.errors import DeadlineExceeded
from regrow.core.ids import Instant, Seconds

DIGEST_BYTES = 8
STALL: Seconds = 5.0
"""Time without a moved byte after which a peer counts as dead."""
STRANGERS_BYTES = 64 << 10
"""Longest frame in bytes that a peer may send before it has shown the job's token."""


def checksum(data: memoryview | bytes) -> bytes:
    """xxh3_64 of the bytes; computed without holding the GIL."""
    return xxhash.xxh3_64_digest(data)


def allow(sock: socket.socket, deadline: Instant, *, stall: Seconds = STALL) -> None:
    """Let the socket's next calls wait until the deadline, but each at most `stall`. Raises `DeadlineExceeded`."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise DeadlineExceeded("the deadline for moving state has passed")
    sock.settimeout(min(left, stall))


def send(sock: socket.socket, data: memoryview | bytes) -> None:
    """Send all bytes. Raises `TimeoutError` if none moves during the socket's timeout (`sendall` limits the total)."""
    left = memoryview(data)
    while left:
        left = left[sock.send(left) :]


def receive(sock: socket.socket, room: memoryview, deadline: Instant) -> None:
    """Fill `room`. Raises `EOFError` if the peer closes earlier, `OSError`, and `DeadlineExceeded`."""
    at = 0
    while at < len(room):
        allow(sock, deadline)
        count = sock.recv_into(room[at:])
        if not count:
            raise EOFError("the peer hung up")
        at += count


def has_hung_up(sock: socket.socket) -> bool:
    """True if the peer, which should send nothing now, has closed the connection. Does not wait."""
    received = select.poll()
    received.register(sock, select.POLLIN)
    if not received.poll(0):  # `recv` would first wait for the socket's own timeout, whatever its flags
        return False
    try:
        return not sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except (BlockingIOError, TimeoutError):
        return False
    except OSError:
        return True
