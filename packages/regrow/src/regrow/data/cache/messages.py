"""Messages between a worker and its node's producer: frames over a unix stream socket that never blocks."""

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
    """First message. `seed`: the session's; `until`: steps in all.

    `identity`: whose batches the worker reads; `parts`: what that was made of, see `identity.Identity`.
    """

    worker: WorkerId
    identity: bytes
    parts: dict[str, str]
    seed: int
    until: int


class ShareGroup(NamedTuple):
    """A worker's part of each step's global batch: these shares, in this order, of `of`."""

    shares: tuple[int, ...]
    of: int

    def has(self, key: Key) -> bool:
        """True if an entry is part of it."""
        return key.share in self.shares and key.shares == self.of


class _ReaderMessage(msgspec.Struct, frozen=True):
    """An entry, and which shares the worker reads in each step, in order; empty: the entry's alone."""

    key: Key
    shares: tuple[int, ...] = ()

    @property
    def group(self) -> ShareGroup:
        """The worker's group of shares."""
        return ShareGroup(self.shares if self.key.share in self.shares else (self.key.share,), self.key.shares)


class At(_ReaderMessage, frozen=True, tag=True):
    """The worker needs this entry and those after it. Not answered, and may get lost: the next one says it again."""


class Want(_ReaderMessage, frozen=True, tag=True):
    """The worker waits for this entry: `Ready` or `CannotMake` follows."""


# --- the producer to a worker --------------------------------------------------------------------------------------


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The producer makes the batches that the worker reads."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """It does not, and never will."""

    reason: str


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The entry is in the cache. `seconds`: what the slowest entry has taken so far, from its start to its file."""

    key: Key
    seconds: float


class CannotMake(msgspec.Struct, frozen=True, tag=True):
    """The data set has raised: the worker that makes the batch itself gets the error with its own traceback."""

    key: Key
    reason: str


ToProducer = Hello | At | Want
ToReader = Welcome | Refused | Ready | CannotMake

TO_PRODUCER: FrameCodec[ToProducer] = FrameCodec(ToProducer)
TO_READER: FrameCodec[ToReader] = FrameCodec(ToReader)


def shortened(reason: str) -> str:
    """A reason that fits into any message."""
    return reason if len(reason) <= _REASON_CHARS else f"{reason[:_REASON_CHARS]} ..."


class Line(Generic[Incoming]):
    """One end of a connection. Nothing here waits; for one thread.

    Args:
        sock: connected; this owns it.
        codec: of what arrives here.
    """

    def __init__(self, sock: socket.socket, codec: FrameCodec[Incoming]) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._codec = codec
        self._unsent = bytearray()
        self._unread = bytearray()

    def fileno(self) -> int:
        """For `select`."""
        return self._sock.fileno()

    @property
    def unsent(self) -> bool:
        """True if data waits until the peer reads: call `flush` when the socket can be written to."""
        return bool(self._unsent)

    def send(self, message: msgspec.Struct) -> None:
        """Send a message now or by a later `flush`. Raises `OSError` when the peer has gone."""
        self._unsent += self._codec.frame(message)
        self.flush()

    def note(self, message: msgspec.Struct) -> None:
        """Send a message that may get lost: it is dropped where the peer does not read. Raises as `send` does."""
        if not self._unsent:
            self.send(message)

    def flush(self) -> None:
        """Send what could not be sent so far, as far as the peer has room for it. Raises `OSError`."""
        while self._unsent:
            try:
                sent = self._sock.send(self._unsent)
            except BlockingIOError:
                return
            del self._unsent[:sent]

    def receive(self) -> list[Incoming]:
        """Messages that have arrived. Raises `OSError` when the peer has gone, and `ProtocolError`."""
        while True:
            try:
                new = self._sock.recv(_RECEIVE_BYTES)
            except BlockingIOError:
                return list(self._codec.take(self._unread))
            if not new:
                messages = list(self._codec.take(self._unread))
                if messages:
                    return messages  # the next call finds the end again
                raise ConnectionResetError("the other end is closed")
            self._unread += new

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()
