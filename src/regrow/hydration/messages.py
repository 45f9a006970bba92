"""The conversation between a receiver and one holder: a few frames, then raw bytes.

    receiver: AskState                     who I am, which generation, which step
    holder:   StateOffered | StateRefused  what there is, or why not
    receiver: SendSpans                    give me these bytes            (any number of times)
    holder:   for each chunk of `plan.chunked`: its bytes, then their xxh3_64 (8 bytes, big-endian)

Either side ends it by closing. Nothing here is ever unpickled.
"""

import socket
import struct
import time

import msgspec
import xxhash

from regrow.core.errors import DeadlineExceeded, ProtocolError
from regrow.core.ids import Generation, Instant, Seconds, StepNo
from regrow.core.wire import MAX_FRAME_BYTES, FrameCodec
from regrow.hydration.inventory import Inventory
from regrow.hydration.plan import Span

DIGEST_BYTES = 8
STALL: Seconds = 5.0
"""A peer that moves no byte for this long is as good as dead."""
_LENGTH = struct.Struct(">I")


class AskState(msgspec.Struct, frozen=True, tag=True):
    """First frame of a receiver. `patience`: how long the holder may take to come to this generation and step."""

    token: str
    generation: Generation
    step: StepNo
    patience: Seconds


class SendSpans(msgspec.Struct, frozen=True, tag=True):
    """Send these bytes, in chunks of at most `chunk` bytes."""

    spans: list[Span]
    chunk: int


class StateOffered(msgspec.Struct, frozen=True, tag=True):
    """The holder has the state, and keeps it still while the connection lasts."""

    inventory: Inventory


class StateRefused(msgspec.Struct, frozen=True, tag=True):
    """The holder does not give its state; the reason is for people."""

    reason: str


Request = AskState | SendSpans
Reply = StateOffered | StateRefused
holder_side: FrameCodec[Request] = FrameCodec(Request)
receiver_side: FrameCodec[Reply] = FrameCodec(Reply)


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


def read_frame(sock: socket.socket) -> bytearray | None:
    """The body of the next frame; None when the peer has closed between frames."""
    head = bytearray(_LENGTH.size)
    first = sock.recv_into(head)
    if not first:
        return None
    receive_into(sock, memoryview(head)[first:])
    (length,) = _LENGTH.unpack(head)
    if length > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {length} bytes was announced; the most is {MAX_FRAME_BYTES}")
    body = bytearray(length)
    receive_into(sock, memoryview(body))
    return body


def hang_up(sock: socket.socket) -> None:
    """End the connection at once, also under a thread that is blocked in it; that thread closes it."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        # Not connected, or closed already: then nobody is blocked in it.
        return
