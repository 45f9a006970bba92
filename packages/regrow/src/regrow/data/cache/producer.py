"""The process that makes the batches of one loader ahead of time for all workers of its node."""

import contextlib
import errno
import logging
import os
import selectors
import socket
import time
from collections.abc import Callable, Iterator

from regrow.core.errors import ProtocolError, Unfit
from regrow.core.ids import Seconds
from regrow.core.net import is_own, unix_address
from regrow.core.process.forks import keep_from_forks
from regrow.data.cache.layout import Key
from regrow.data.cache.making import Making
from regrow.data.cache.messages import (
    TO_PRODUCER,
    At,
    CannotMake,
    Hello,
    Line,
    Ready,
    Refused,
    ToProducer,
    Want,
    Welcome,
    shortened,
)

_BACKLOG = 128
_IDLE_S: Seconds = 1.0
_BIND_S: Seconds = 10.0
_BIND_AGAIN_S: Seconds = 0.02
"""Interval between attempts to bind the socket."""
_log = logging.getLogger("regrow")


class _Reader:
    """A connected worker. `at`: the entry that it needs next, `wants`: the entry that it waits for."""

    def __init__(self, line: Line[ToProducer]) -> None:
        self.line = line
        self.welcome = False
        self.at: At | None = None
        self.wants: Want | None = None


class Producer:
    """Serves the readers of one loader, in one thread, which reads messages between two batches.

    Args:
        making: makes the entries.
        address: path of the socket, in the form of `core/net.py`.
        served: called once, before the first entry is announced to a reader.
    """

    def __init__(self, making: Making, address: str, *, served: Callable[[], None]) -> None:
        self._making = making
        self._address = address
        self._served: Callable[[], None] | None = served
        # Not epoll: it keeps reporting descriptors that were closed here but are still open in loader workers.
        self._selector = selectors.PollSelector()
        self._readers: list[_Reader] = []
        self._watched: set[int] = set()

    def run(self) -> None:
        """Serve until the process is killed. Raises `OSError` if the socket cannot be bound."""
        with self._listening():
            while True:
                self._watch_makers()
                rest = self._making.rest
                self._listen(0.0 if self._making.busy else _IDLE_S if rest is None else min(rest, _IDLE_S))
                self._make()

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        if not self._address.startswith("@"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._address)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as listener:
            self._bind(keep_from_forks(listener))
            listener.listen(_BACKLOG)
            self._selector.register(listener, selectors.EVENT_READ, listener)
            try:
                yield
            finally:
                self._making.close()

    def _bind(self, listener: socket.socket) -> None:
        """Bind the socket, once processes of an earlier producer, such as loader workers, release the address."""
        until = time.monotonic() + _BIND_S
        while True:
            try:
                listener.bind(unix_address(self._address))
            except OSError as error:
                if error.errno != errno.EADDRINUSE or time.monotonic() > until:
                    raise
                time.sleep(_BIND_AGAIN_S)
            else:
                return

    # --- readers -------------------------------------------------------------------------------------------------

    def _listen(self, within: Seconds) -> None:
        for event, mask in self._selector.select(within):
            if isinstance(event.data, socket.socket):
                self._accept(event.data)
            elif isinstance(event.data, _Reader):
                self._attend(event.data, mask)

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError:  # the worker has gone, or no descriptor is left: the worker will reconnect
            return
        if not is_own(sock):
            sock.close()
            return
        reader = _Reader(Line(sock, TO_PRODUCER))
        self._readers.append(reader)
        self._selector.register(reader.line, selectors.EVENT_READ, reader)

    def _attend(self, reader: _Reader, mask: int) -> None:
        try:
            if mask & selectors.EVENT_WRITE:
                reader.line.flush()
            if mask & selectors.EVENT_READ:
                for message in reader.line.receive():
                    self._receive(reader, message)
            self._watch(reader)
        except OSError:
            self._drop(reader)
        except ProtocolError as error:
            _log.warning("a reader of the data cache is not understood: %s", error)
            self._drop(reader)

    def _receive(self, reader: _Reader, message: ToProducer) -> None:
        match message:
            case Hello():
                try:
                    self._making.check(message)
                    reader.welcome = True
                    reader.line.send(Welcome())
                except Unfit as reason:
                    reader.line.send(Refused(shortened(str(reason))))
            case _ if not reader.welcome:
                return  # sent before the refusal reached the worker
            case At():
                reader.at = message
            case Want():
                reader.wants = message
                self._making.try_again(message.key)
                self._answer(message.key)
        self._stand()

    def _stand(self) -> None:
        at = [reader.at for reader in self._readers if reader.at is not None]
        self._making.stand(at, {reader.wants for reader in self._readers if reader.wants is not None})

    def _watch(self, reader: _Reader) -> None:
        if reader not in self._readers:
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if reader.line.unsent else 0)
        self._selector.modify(reader.line, wanted, reader)

    def _drop(self, reader: _Reader) -> None:
        if reader not in self._readers:
            return  # dropped already, after an error while sending
        self._readers.remove(reader)
        self._selector.unregister(reader.line)
        reader.line.close()
        self._stand()

    def _watch_makers(self) -> None:
        """Make `_listen` return when a loader worker delivers a batch."""
        now = self._making.descriptors
        for gone in self._watched - now:
            self._selector.unregister(gone)
        for new in now - self._watched:
            self._selector.register(new, selectors.EVENT_READ, None)
        self._watched = now

    # --- entries -------------------------------------------------------------------------------------------------

    def _make(self) -> None:
        news = self._making.make()
        for key in news:
            self._answer(key)
        if news:
            self._stand()
        if self._making.refusal:
            for reader in list(self._readers):
                self._refuse(reader)

    def _refuse(self, reader: _Reader) -> None:
        with contextlib.suppress(OSError):  # the reader has gone already
            reader.line.send(Refused(shortened(self._making.refusal)))
        self._drop(reader)

    def _answer(self, key: Key) -> None:
        """Answer the readers that wait for this entry, if it is ready or has failed."""
        reason = self._making.failed(key)
        if reason is None and not self._making.has(key):
            return
        if reason is None and self._served is not None:
            self._served()
            self._served = None
        answer = Ready(key, self._making.slowest) if reason is None else CannotMake(key, shortened(reason))
        for reader in [other for other in self._readers if other.wants is not None and other.wants.key == key]:
            reader.wants = None
            try:
                reader.line.send(answer)
                self._watch(reader)
            except OSError:
                self._drop(reader)
