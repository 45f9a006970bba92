"""Messages between a worker and its node's producer, as frames over a nonblocking unix stream socket."""

import socket
from typing import Generic, NamedTuple, TypeVar

import msgspec

from regrow.core.ids import WorkerId
from regrow.core.wire import FrameCodec
from regrow.data.cache.layout import Key

_RECEIVE_BYTES = 1 << 16
_REASON_CHARS = 4000

Incoming = TypeVar("Incoming")


# --- a worker to the producer --------------------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, tag=True):
    """First message. `seed`: the session's seed; `until`: steps of the whole training.

    `identity`: identity of the loader that the worker reads; `parts`: its ingredients, see `identity.Identity`.
    """

    worker: WorkerId
    identity: bytes
    parts: dict[str, str]
    seed: int
    until: int


class ShareGroup(NamedTuple):
    """A worker's part of each step's global batch: these shares, in this order, out of `of` shares."""

    shares: tuple[int, ...]
    of: int

    def has(self, key: Key) -> bool:
        """True if the entry belongs to one of these shares."""
        return key.share in self.shares and key.shares == self.of


class _ReaderMessage(msgspec.Struct, frozen=True):
    """An entry, and the shares that the worker reads in each step, in order; empty: only the entry's share."""

    key: Key
    shares: tuple[int, ...] = ()

    @property
    def group(self) -> ShareGroup:
        """The worker's group of shares."""
        return ShareGroup(self.shares if self.key.share in self.shares else (self.key.share,), self.key.shares)


class At(_ReaderMessage, frozen=True, tag=True):
    """The worker needs this entry and those after it. Not answered; it may get lost, since the next one repeats it."""


class Want(_ReaderMessage, frozen=True, tag=True):
    """The worker waits for this entry; the answer is `Ready` or `CannotMake`."""


# --- the producer to a worker --------------------------------------------------------------------------------------


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The producer makes the batches of this worker."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The producer does not make the batches of this worker, and never will."""

    reason: str


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The entry is in the cache. `seconds`: longest time of any entry so far, from its start to its file."""

    key: Key
    seconds: float


class CannotMake(msgspec.Struct, frozen=True, tag=True):
    """The entry could not be made: the worker makes it itself, and gets any error with a traceback of its own."""

    key: Key
    reason: str


ToProducer = Hello | At | Want
ToReader = Welcome | Refused | Ready | CannotMake

TO_PRODUCER: FrameCodec[ToProducer] = FrameCodec(ToProducer)
TO_READER: FrameCodec[ToReader] = FrameCodec(ToReader)


def shortened(reason: str) -> str:
    """Cut a reason to a length that fits into any message."""
    return reason if len(reason) <= _REASON_CHARS else f"{reason[:_REASON_CHARS]} ..."


class Line(Generic[Incoming]):
    """One end of a connection. Never blocks; not thread-safe.

    Args:
        sock: connected socket; owned by this object.
        codec: codec of incoming messages.
    """

    def __init__(self, sock: socket.socket, codec: FrameCodec[Incoming]) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._codec = codec
        self._unsent = bytearray()
        self._unread = bytearray()

    def fileno(self) -> int:
        """Descriptor of the socket, for `select`."""
        return self._sock.fileno()

    @property
    def unsent(self) -> bool:
        """True if data is left to send: call `flush` when the socket is writable."""
        return bool(self._unsent)

    def send(self, message: msgspec.Struct) -> None:
        """Send a message now or by a later `flush`. Raises `OSError` if the peer has gone."""
        self._unsent += self._codec.frame(message)
        self.flush()

    def note(self, message: msgspec.Struct) -> None:
        """Send a message, or drop it if earlier data is still unsent. Raises `OSError` as `send` does."""
        if not self._unsent:
            self.send(message)

    def flush(self) -> None:
        """Send unsent data, as far as the peer has room for it. Raises `OSError`."""
        while self._unsent:
            try:
                sent = self._sock.send(self._unsent)
            except BlockingIOError:
                return
            del self._unsent[:sent]

    def receive(self) -> list[Incoming]:
        """The messages that have arrived. Raises `OSError` if the peer has gone, and `ProtocolError`."""
        while True:
            try:
                new = self._sock.recv(_RECEIVE_BYTES)
            except BlockingIOError:
                return list(self._codec.take(self._unread))
            if not new:
                messages = list(self._codec.take(self._unread))
                if messages:
                    return messages  # the next call reads the end again
                raise ConnectionResetError("the other end is closed")
            self._unread += new

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()
