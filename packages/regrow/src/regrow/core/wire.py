"""Length-prefixed msgpack frames, in which two processes of a job exchange messages. Nothing is ever unpickled."""

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Generic, TypeVar

import msgspec

from regrow.core.errors import ProtocolError

_LENGTH = struct.Struct(">I")
MAX_FRAME_BYTES = 64 << 20
_PART_BYTES = 1 << 20
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Errors of decoding bytes that are not a message of the expected type."""

Incoming = TypeVar("Incoming")


def encoded(encoder: msgspec.msgpack.Encoder, message: msgspec.Struct) -> bytes:
    """Encode a message. Text that is not valid Unicode, such as a file name in an older encoding, is escaped."""
    try:
        return encoder.encode(message)
    except UnicodeEncodeError:
        plain = msgspec.to_builtins(message, builtin_types=(bytes, bytearray, memoryview))
        return encoder.encode(_in_unicode(plain))


def _in_unicode(value: object) -> object:
    match value:
        case str():
            return value.encode("utf-8", "backslashreplace").decode()
        case dict():
            return {_in_unicode(key): _in_unicode(item) for key, item in value.items()}
        case list() | tuple():
            return [_in_unicode(item) for item in value]
        case _:
            return value


class FrameCodec(Generic[Incoming]):
    """Encodes any message, and decodes the messages of one union type.

    Args:
        incoming: the union of message types that may arrive.
    """

    def __init__(self, incoming: object) -> None:
        self._decoder: msgspec.msgpack.Decoder[Incoming] = msgspec.msgpack.Decoder(incoming)
        self._encoder = msgspec.msgpack.Encoder()

    def frame(self, message: msgspec.Struct) -> bytes:
        """A message as bytes, with its length in front."""
        body = encoded(self._encoder, message)
        if len(body) > MAX_FRAME_BYTES:
            raise ProtocolError(f"a {type(message).__name__} of {len(body)} bytes is too large to send")
        return _LENGTH.pack(len(body)) + body

    def decode(self, body: bytes | bytearray | memoryview) -> Incoming:
        """Decode a frame's body. Raises `ProtocolError` if it is no message of the incoming type."""
        try:
            return self._decoder.decode(body)
        except UNREADABLE as error:
            raise ProtocolError(f"not a message of this protocol: {error}") from error

    def take(self, received: bytearray) -> Iterator[Incoming]:
        """Yield the messages that have arrived completely, and remove them from the buffer. Raises `ProtocolError`."""
        while (message := self.next(received)) is not None:
            yield message

    def next(self, received: bytearray, most: int = MAX_FRAME_BYTES) -> Incoming | None:
        """Remove and return the first message, of at most `most` bytes; None if it has not arrived completely.

        Raises `ProtocolError`; the rest of the buffer is useless then.
        """
        if len(received) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(received)
        _check_length(length, most)
        end = _LENGTH.size + length
        if len(received) < end:
            return None
        body = bytes(received[_LENGTH.size : end])
        del received[:end]
        return self.decode(body)


def _check_length(length: int, most: int = MAX_FRAME_BYTES) -> None:
    if length > most:
        raise ProtocolError(f"a frame of {length} bytes was announced; the most is {most}")


def receive_into(sock: socket.socket, room: memoryview) -> None:
    """Fill `room`. Raises `EOFError` if the peer closes earlier, `TimeoutError`, `OSError`."""
    at, size = 0, len(room)
    while at < size:
        count = sock.recv_into(room[at:])
        if not count:
            raise EOFError("the peer hung up")
        at += count


def read_frame(sock: socket.socket, most: int = MAX_FRAME_BYTES) -> bytearray | None:
    """The body of the next frame, of at most `most` bytes; None if the peer has closed between frames."""
    head = bytearray(_LENGTH.size)
    first = sock.recv_into(head)
    if not first:
        return None
    receive_into(sock, memoryview(head)[first:])
    (length,) = _LENGTH.unpack(head)
    _check_length(length, most)
    body = bytearray()
    while len(body) < length:  # allocate memory for the bytes that came, not for the announced length
        part = bytearray(min(_PART_BYTES, length - len(body)))
        receive_into(sock, memoryview(part))
        body += part
    return body


def _identity_of(descriptor: int) -> tuple[int, int] | None:
    try:
        known = os.fstat(descriptor)
    except OSError:
        return None
    return known.st_dev, known.st_ino


class BlockingChannel(Generic[Incoming]):
    """Frames over a connected stream socket, for a process without an event loop.

    `send` may be called from any thread, `messages` from only one.
    """

    def __init__(self, sock: socket.socket, codec: FrameCodec[Incoming]) -> None:
        self._sock = sock
        self._codec = codec
        self._sending = threading.Lock()
        self._number, self._identity = sock.fileno(), _identity_of(sock.fileno())

    @property
    def replaced(self) -> int | None:
        """The number of the socket's descriptor, if other code has closed or reused it; else None."""
        return None if _identity_of(self._number) == self._identity else self._number

    def send(self, message: msgspec.Struct) -> None:
        """Send one message. Raises `OSError` when the peer has gone."""
        frame = self._codec.frame(message)
        with self._sending:
            self._sock.sendall(frame)

    def messages(self) -> Iterator[Incoming]:
        """Yield messages until the peer closes."""
        with self._sock.makefile("rb") as stream:
            while True:
                head = stream.read(_LENGTH.size)
                if len(head) < _LENGTH.size:
                    return
                (length,) = _LENGTH.unpack(head)
                _check_length(length)
                body = stream.read(length)
                if len(body) < length:
                    return
                yield self._codec.decode(body)

    def let_go(self) -> None:
        """In a fork of the channel's owner: forget the socket here, without ending the owner's connection."""
        descriptor = self._sock.detach()
        if descriptor >= 0:
            os.close(descriptor)

    def close(self) -> None:
        """Close the socket; a blocked `messages` ends."""
        with contextlib.suppress(OSError):  # Not connected any more, so no thread is blocked in it.
            self._sock.shutdown(socket.SHUT_RDWR)
        # Not `close`: that waits for the reader's file object, which lives as long as the unfinished `messages`.
        descriptor = self._sock.detach()
        if descriptor >= 0:
            os.close(descriptor)
