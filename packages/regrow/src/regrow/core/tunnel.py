"""TLS for sockets that several threads use, poll and shut down concurrently, which an `SSLSocket` does not support.

The user of a connection gets one end of a local socket pair; one thread of the process carries bytes between the other
end and the encrypted connection. If one side is closed, so is the other. The thread also does the handshake: a connect
succeeds as soon as the kernel accepts it, as without TLS, and the first bytes wait until the handshake is done.
"""

import contextlib
import logging
import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable

from regrow.core.ids import Instant, Seconds
from regrow.core.process.forks import at_exit
from regrow.core.strangers import refused

HANDSHAKE_S: Seconds = 10.0
LAST_WORDS_S: Seconds = 30.0
"""Longest time that an ending process waits for its peers to take its last bytes."""
_LOOK_S: Seconds = 0.02
_LOOK_AT_LATE_S: Seconds = 1.0
_CHUNK = 256 << 10
_TURN = 4 << 20
"""Most bytes carried for one connection before other connections have their turn."""
_log = logging.getLogger(__name__)


class _Way:
    """One direction of a tunnel, with the bytes that were read and are not yet written."""

    def __init__(self, read: Callable[[memoryview], int], write: Callable[[memoryview], int]) -> None:
        self._read, self._write = read, write
        self._room = memoryview(bytearray(_CHUNK))
        self.left = self._room[:0]
        """Bytes to be written."""
        self.ended = False
        """True if the source has ended and all its bytes were written."""

    def carry(self) -> bool:
        """Carry bytes until a side would block (returns False) or the turn is over (True). Raises `OSError`."""
        done = 0
        try:
            while done < _TURN:
                if not self.left:
                    count = self._read(self._room)
                    self.left, self.ended = self._room[:count], count == 0
                    if self.ended:
                        return False
                while self.left:
                    count = self._write(self.left)
                    self.left, done = self.left[count:], done + count
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return False
        return True

    def wants(self, *, writing: bool) -> int:
        """Events to poll on the side that is written to (`writing=True`) or on the side that is read."""
        if writing:
            return select.EPOLLOUT if self.left else 0
        return 0 if self.left else select.EPOLLIN


class _Tunnel:
    """One encrypted connection and its local socket pair.

    Args:
        near: this process's other end of the pair.
        far: the encrypted connection, before its handshake.
        until: deadline of the handshake; None: the holder of the near end decides how long to wait.
    """

    def __init__(self, near: socket.socket, far: ssl.SSLSocket, until: Instant | None) -> None:
        self.near, self.far, self.until = near, far, until
        self._greeted = self._moving = False
        self._out = _Way(near.recv_into, far.send)
        self._in = _Way(self._decrypted, near.send)
        self._watched: dict[int, int] = {}

    def _decrypted(self, room: memoryview) -> int:
        try:
            return self.far.recv_into(room)
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError):  # the protocol above can recognize whether this was the end
            return 0

    @property
    def holds(self) -> bool:
        """True if the tunnel has data that has not left this process."""
        return self._moving or bool(self._out.left) or _waiting(self.near)

    def advance(self, poller: select.epoll) -> bool:
        """Carry bytes until both sides would block (returns False) or the turn is over (True).

        Raises `OSError` when the connection is over.
        """
        if not self._greeted and not self._greet(poller):
            return False
        self._moving = True
        try:
            again = self._out.carry()
        except OSError:
            while self._in.carry():  # deliver the bytes that came before the end
                pass
            raise
        finally:
            self._moving = False
        again = self._in.carry() or again
        if self._out.ended or self._in.ended:
            raise ConnectionAbortedError("it was hung up")
        near, far = self._in.wants(writing=True), self._in.wants(writing=False)
        self._watch(poller, self.near, near | self._out.wants(writing=False))
        self._watch(poller, self.far, far | self._out.wants(writing=True))
        return again

    def _greet(self, poller: select.epoll) -> bool:
        try:
            self.far.do_handshake()
        except ssl.SSLWantReadError:
            self._watch(poller, self.far, select.EPOLLIN)
        except ssl.SSLWantWriteError:
            self._watch(poller, self.far, select.EPOLLOUT)
        except OSError as error:
            if not isinstance(error, ssl.SSLEOFError | ConnectionError):
                refused.add("tls", why(error))
            raise
        else:
            self.until, self._greeted = None, True
            return True
        if not _hung_up(self.near):
            self._watch(poller, self.near, select.EPOLLRDHUP)
        elif not _waiting(self.near):
            raise ConnectionAbortedError("no request waits for it any more")
        elif self.until is None:  # the last bytes may still be delivered
            self.until = time.monotonic() + LAST_WORDS_S
            self._watch(poller, self.near, 0)
        return False

    def _watch(self, poller: select.epoll, sock: socket.socket, events: int) -> None:
        """Poll these events; with none, unregister the side, because epoll would report its end again and again."""
        descriptor, before = sock.fileno(), self._watched.get(sock.fileno(), 0)
        if events == before:
            return
        if not before:
            poller.register(descriptor, events)
        elif not events:
            poller.unregister(descriptor)
        else:
            poller.modify(descriptor, events)
        self._watched[descriptor] = events

    def close(self, poller: select.epoll) -> None:
        """Close both sides."""
        for sock in (self.near, self.far):
            self._watch(poller, sock, 0)
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


def _hung_up(near: socket.socket) -> bool:
    """True if the holder of the other end has closed it or shut it down."""
    poller = select.poll()
    poller.register(near, select.POLLRDHUP)
    return bool(poller.poll(0))


def _waiting(near: socket.socket) -> bool:
    """True if there is something to read from it."""
    try:
        return bool(near.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except OSError:
        return False


class _Carrier:
    """The thread of this process that carries the bytes of all its tunnels."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._changed = threading.Condition()
        self._new: list[_Tunnel] = []
        self._live: dict[int, _Tunnel] = {}
        """Tunnels by the descriptor of either side."""
        self._poller = select.epoll()
        self._bell, self._ring = socket.socketpair()
        self._bell.setblocking(False)
        self._ring.setblocking(False)
        self._poller.register(self._ring.fileno(), select.EPOLLIN)
        threading.Thread(target=self._run, name="regrow-tls", daemon=True).start()

    def add(self, tunnel: _Tunnel) -> None:
        """Start to carry bytes for this tunnel."""
        with self._changed:
            self._new.append(tunnel)
        with contextlib.suppress(BlockingIOError):  # the socket is full, so the thread is awake
            self._bell.send(b"!")

    def flush(self, within: Seconds) -> None:
        """Wait until all written bytes have left this process, but no longer than `within` seconds."""
        until = time.monotonic() + within
        with self._changed:
            while any(each.holds for each in (*self._new, *self._live.values())):
                left = until - time.monotonic()
                if left <= 0:
                    return
                self._changed.wait(min(_LOOK_S, left))

    def _run(self) -> None:
        busy: set[_Tunnel] = set()
        greeting: set[_Tunnel] = set()
        while True:
            events = self._poller.poll(0 if busy else _LOOK_AT_LATE_S if greeting else None)
            with contextlib.suppress(BlockingIOError):
                self._ring.recv(1 << 10)
            with self._changed:
                new, self._new = self._new, []
                for each in new:
                    self._live[each.near.fileno()] = self._live[each.far.fileno()] = each
            turn = busy | set(new) | {self._live[number] for number, _ in events if number in self._live}
            now = time.monotonic()
            over = {each for each in greeting if each.until is not None and now > each.until}
            busy = set()
            for each in turn - over:
                try:
                    if each.advance(self._poller):
                        busy.add(each)
                except OSError as error:
                    _log.debug("a connection ended: %s", error)
                    over.add(each)
                except Exception:  # noqa: BLE001 - a defect in regrow costs one connection, not all of this thread
                    _log.exception("a connection was given up")
                    over.add(each)
            greeting = {each for each in greeting | turn if each.until is not None} - over
            with self._changed:
                for each in over:
                    for sock in (each.near, each.far):
                        self._live.pop(sock.fileno(), None)
                    each.close(self._poller)
                self._changed.notify_all()


_carrier: _Carrier | None = None
_making = threading.Lock()


def _carry(tunnel: _Tunnel) -> None:
    global _carrier
    with _making:
        if _carrier is None or _carrier.pid != os.getpid():
            _carrier = _Carrier()
            at_exit(flush)
        _carrier.add(tunnel)


def flush(within: Seconds = LAST_WORDS_S) -> None:
    """Wait, when the process exits, until all bytes written to its connections have left it."""
    if _carrier is not None and _carrier.pid == os.getpid():
        _carrier.flush(within)


def why(error: OSError) -> str:
    """Reason of a failed handshake, for people."""
    reason = getattr(error, "verify_message", "") or getattr(error, "reason", "")
    return f"TLS: {reason}" if reason else str(error)


def called(sock: socket.socket, context: ssl.SSLContext) -> socket.socket:
    """The near end of a tunnel for an accepted connection, whose caller must finish the handshake in `HANDSHAKE_S`."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setblocking(False)
    far = context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
    return _near(far, time.monotonic() + HANDSHAKE_S)


def calling(sock: socket.socket, context: ssl.SSLContext, host: str) -> socket.socket:
    """The near end of a tunnel for an outgoing connection to a peer whose certificate must be for `host`."""
    sock.setblocking(False)
    return _near(context.wrap_socket(sock, server_hostname=host, do_handshake_on_connect=False), None)


def _near(far: ssl.SSLSocket, until: Instant | None) -> socket.socket:
    mine, theirs = socket.socketpair()
    try:
        theirs.setblocking(False)
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _TURN)
        _carry(_Tunnel(theirs, far, until))
    except BaseException:
        mine.close()
        theirs.close()
        far.close()
        raise
    return mine
