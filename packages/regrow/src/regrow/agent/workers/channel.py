"""The agent's end of the channel to a worker: frames over a stream socket, without ever blocking the event loop."""

import asyncio
import socket
from collections.abc import Callable

from regrow.core.errors import ProtocolError
from regrow.core.messages.unions import WorkerFact, WorkerOrder
from regrow.core.wire import FrameCodec

_READ_BYTES = 256 << 10
_UNSENT_LIMIT = 16 << 20


class WorkerChannel:
    """Channel to a worker: facts up, orders down.

    Args:
        sock: this end of the socket pair.
        on_fact: called for every fact, in order.
        on_garbage: called once if the worker sends an invalid message; the channel is then no longer read.
    """

    def __init__(
        self, sock: socket.socket, *, on_fact: Callable[[WorkerFact], None], on_garbage: Callable[[ProtocolError], None]
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._on_fact = on_fact
        self._on_garbage = on_garbage
        self._codec: FrameCodec[WorkerFact] = FrameCodec(WorkerFact)
        self._received = bytearray()
        self._unsent = bytearray()
        self._reading = False
        self._writing = False

    def open(self) -> None:
        """Start to read. Until then the worker's messages wait in the socket."""
        asyncio.get_running_loop().add_reader(self._sock, self.drain)
        self._reading = True

    def drain(self) -> None:
        """Read everything that has arrived; from a dead process that is everything it ever sent."""
        while self._reading:
            try:
                part = self._sock.recv(_READ_BYTES)
            except BlockingIOError:
                break
            except ConnectionError:
                part = b""
            if not part:
                self._stop_reading()
            self._received += part
            try:
                for fact in self._codec.take(self._received):
                    self._on_fact(fact)
            except ProtocolError as error:
                self._stop_reading()
                self._on_garbage(error)
            if len(part) < _READ_BYTES:
                break

    def send(self, order: WorkerOrder) -> None:
        """Send an order; bytes that the socket does not accept now are sent later. Raises `ProtocolError`."""
        self._unsent += self._codec.frame(order)
        if len(self._unsent) > _UNSENT_LIMIT:
            raise ProtocolError(f"{len(self._unsent)} bytes of orders were not read by their worker")
        if not self._writing:
            self._flush()

    def _flush(self) -> None:
        try:
            while self._unsent:
                sent = self._sock.send(self._unsent)
                del self._unsent[:sent]
        except BlockingIOError:
            if not self._writing:
                asyncio.get_running_loop().add_writer(self._sock, self._flush)
                self._writing = True
            return
        except OSError:  # The worker closed its end; its exit or silence is noticed elsewhere.
            self._unsent.clear()
        if self._writing:
            asyncio.get_running_loop().remove_writer(self._sock)
            self._writing = False

    def _stop_reading(self) -> None:
        if self._reading:
            asyncio.get_running_loop().remove_reader(self._sock)
            self._reading = False

    def close(self) -> None:
        """Close this end, which ends the worker's `orders`."""
        self._stop_reading()
        if self._writing:
            asyncio.get_running_loop().remove_writer(self._sock)
            self._writing = False
        self._sock.close()
