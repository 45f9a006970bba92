"""A worker's connection to its node's producer, which may be running, not started yet, or not answering."""

import errno
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Protocol

from regrow.core.errors import GenerationHalted, ProtocolError
from regrow.core.ids import Instant, Seconds
from regrow.core.messages.data import producer_given_up, producer_socket
from regrow.core.net import is_own, unix_address
from regrow.core.process.forks import keep_from_forks
from regrow.data.cache.layout import Key
from regrow.data.cache.messages import TO_READER, At, CannotMake, Hello, Line, Ready, Refused, ToReader, Want, Welcome

PATIENCE_S: Seconds = 5.0
"""Least time that a worker waits for an entry; it waits up to three times as long as the slowest entry took."""
_FACTOR = 3.0
EXPECTED_S: Seconds = 15.0
"""Time after which an absent producer is no longer expected, though it may still start."""
_BEAT_S: Seconds = 1.0


class Reader(Protocol):
    """The interface of a worker that is used while the worker waits for a batch."""

    @property
    def halted(self) -> bool:
        """True if the generation is over, so that the awaited batch is not needed any more."""
        ...

    @property
    def stepping(self) -> bool:
        """True while the worker takes part in the training; False in a rehearsal, and in a standby without a rank."""
        ...

    @property
    def moved(self) -> bool:
        """True if the world size has just changed, so that no batch can have been made ahead for it."""
        ...

    def want_producer(self, loader: int) -> None:
        """Request a producer for this loader from the agent."""
        ...

    def beat(self) -> None:
        """Send a heartbeat while the worker waits."""
        ...

    def on_halt(self, call: Callable[[], None]) -> None:
        """Register `call`, to be called from another thread when the generation is over."""
        ...


class Reach:
    """A connection to the producer of one loader, opened when it is first needed, and reopened after a loss.

    It never waits for a producer that is not running. Only the training thread may call these methods, except `wake`,
    which any thread may call.

    Args:
        socket_dir: folder of the producers' sockets.
        data_dir: folder of the node's cache.
        loader: number of the loader.
        hello: the first message: the worker, and the loader's identity.
        reader: the worker.
    """

    def __init__(self, socket_dir: str, data_dir: str, loader: int, hello: Hello, reader: Reader) -> None:
        self._address = producer_socket(socket_dir, loader)
        self._given_up = producer_given_up(data_dir, loader)
        self._hello = hello
        self._reader = reader
        self._line: Line[ToReader] | None = None
        self._stalled = False
        """True if the producer did not answer in time; until its next message the worker does not wait for it."""
        self._away_since: Instant | None = None
        self._slowest: Seconds = 0.0
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing = threading.Lock()
        self.refusal = ""
        """Reason why the producer refused this worker; empty if it did not."""
        self.shares: tuple[int, ...] = ()
        """Shares that the worker reads in each step; empty: only the requested share."""
        self.over = False
        """True if no producer will ever serve this worker."""

    @property
    def expected(self) -> bool:
        """True if the producer is running or should be soon."""
        if self.over or self._stalled:
            return False
        return self._away_since is None or time.monotonic() - self._away_since < EXPECTED_S

    def ask(self, key: Key) -> bool:
        """Wait until the entry is in the cache; False: the worker must make it itself. Raises `GenerationHalted`."""
        if not self._open() or (self._stalled and not self._answers()):
            return False
        deadline = time.monotonic() + max(PATIENCE_S, _FACTOR * self._slowest)
        try:
            if self._line is not None:
                if self._reader.stepping:
                    self._line.send(At(key, self.shares))
                self._line.send(Want(key, self.shares))
            while self._line is not None:
                answer = self._receive(key)
                if answer is not None:
                    return answer
                if self._reader.halted:
                    raise GenerationHalted(f"no worker needs the batch of step {key.step} now")
                left = deadline - time.monotonic()
                if left <= 0:
                    self._stalled = True
                    return False
                self._wait(min(left, _BEAT_S))
                self._reader.beat()
        except (OSError, ProtocolError):
            self._drain()
        return False

    def note(self, key: Key) -> None:
        """Notify the producer, if it is running, that this entry and those after it are needed."""
        if not self._open() or self._line is None:
            return
        try:
            self._line.note(At(key, self.shares))
            self._receive(None)
        except (OSError, ProtocolError):
            self._drain()

    def wake(self) -> None:
        """Make a blocked `ask` check if the generation is over. From any thread."""
        with self._closing:
            if self._bell >= 0:
                os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        """Close the connection. It is not opened again."""
        self._hang_up()
        self.over = True
        with self._closing:
            bell, self._bell = self._bell, -1
            if bell >= 0:
                os.close(bell)

    # --- the connection ------------------------------------------------------------------------------------------

    def _open(self) -> bool:
        if self._line is not None:
            return True
        if self.over:
            return False
        sock = keep_from_forks(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK))
        try:
            sock.connect(unix_address(self._address))
            if not is_own(sock):
                raise PermissionError(errno.EPERM, "a process of another user listens there", self._address)
            line = Line(sock, TO_READER)
            line.send(self._hello)
        except OSError:  # the producer is not running, has just died, or its backlog is full
            sock.close()
            self._away()
            return False
        self._line = line
        return True

    def _away(self) -> None:
        if self._away_since is None:
            self._away_since = time.monotonic()
        self.over = self.over or os.path.exists(self._given_up)

    def _lost(self) -> None:
        self._hang_up()
        self._away()

    def _hang_up(self) -> None:
        line, self._line = self._line, None
        self._stalled = False
        if line is not None:
            line.close()

    # --- the producer's messages ---------------------------------------------------------------------------------

    def _answers(self) -> bool:
        """True if a producer that did not answer in time has sent something since."""
        try:
            self._receive(None)
        except (OSError, ProtocolError):
            self._lost()
        return self._line is not None and not self._stalled

    def _receive(self, key: Key | None) -> bool | None:
        """Process received messages. True: entry `key` is ready; False: it will not be made; None: no answer yet."""
        line = self._line
        if line is None:
            return False
        line.flush()
        return self._take_in(line, key)

    def _drain(self) -> None:
        """Process messages sent before the connection failed, such as a refusal, then close it."""
        try:
            if self._line is not None:
                self._take_in(self._line, None)
        except (OSError, ProtocolError):
            pass  # there were no messages
        if not self.over:
            self._lost()

    def _take_in(self, line: Line[ToReader], key: Key | None) -> bool | None:
        answer = None
        for message in line.receive():
            self._stalled = False
            match message:
                case Welcome():
                    self._away_since = None
                case Refused(reason=reason):
                    self.refusal, self.over = reason, True
                    self._hang_up()
                    return False
                case Ready(key=made, seconds=seconds):
                    self._slowest = max(self._slowest, seconds)
                    answer = True if made == key else answer
                case CannotMake(key=failed):
                    answer = False if failed == key else answer
        return answer

    def _wait(self, within: Seconds) -> None:
        line = self._line
        if line is None:
            return
        poll = select.poll()
        poll.register(line, select.POLLIN | (select.POLLOUT if line.unsent else 0))
        poll.register(self._bell, select.POLLIN)
        if any(descriptor == self._bell for descriptor, _ in poll.poll(within * 1000)):
            os.eventfd_read(self._bell)
