"""The one interface for sockets between processes of a job: it listens, connects, and checks the peer.

An endpoint is `unix:<path>`, within a node, or `tcp:<host>:<port>`, between nodes, encrypted as in `core/tls.py`.
Paths of a job begin with `@`: they are names in the kernel's abstract namespace (unix(7)), so no cleaner of folders,
logout or long `TMPDIR` breaks them, and nobody must remove them. They have no mode, so both ends check the peer's user.
"""

import asyncio
import errno
import hmac
import logging
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from regrow.core import tls, tunnel
from regrow.core.errors import ProtocolError, RegrowError, UsageError
from regrow.core.ids import Instant, Seconds
from regrow.core.process.forks import keep_from_forks
from regrow.core.strangers import HELLO_S, MOST, TURN_S, refused

CONNECT_S: Seconds = 10.0
WINDOW = 1 << 20
LONGEST_UNIX_PATH = 107
_BACKLOG = 128
_END_S: Seconds = 10.0
_PAUSE_S: Seconds = 0.05
_log = logging.getLogger(__name__)

Speaking = TypeVar("Speaking", bound=asyncio.Protocol)


def same_secret(given: str | bytes, token: str | bytes) -> bool:
    """True if a peer has sent the job's secret; the comparison takes equally long for any guess."""
    one, other = (text.encode() if isinstance(text, str) else text for text in (given, token))
    return hmac.compare_digest(one, other)


_PEER = struct.Struct("3i")
"""Fields of `SO_PEERCRED`: process, user and group of the other end of a unix socket."""
_STARTED_BY = os.getuid()


def sockets_home() -> str:
    """A new, unguessable prefix for a node's socket names; pass it to `listen` as `folder`."""
    return f"@regrow-{secrets.token_hex(8)}"


def unix_address(path: str | Path) -> str:
    """An endpoint's path in the form that socket calls take."""
    text = str(path)
    return f"\0{text[1:]}" if text.startswith("@") else text


def is_own(sock: socket.socket) -> bool:
    """True if the peer of a unix socket is a process of this user. Always True for TCP, where peers show the token."""
    if sock.family != socket.AF_UNIX:
        return True
    _, user, _ = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return user in (os.getuid(), _STARTED_BY)  # the script may have changed its own user


def _own_end(sock: socket.socket, endpoint: object) -> None:
    if not is_own(sock):
        raise PermissionError(errno.EPERM, "a process of another user listens there", str(endpoint))


def _place(endpoint: str) -> str | tuple[str, int]:
    kind, _, place = endpoint.partition(":")
    host, _, port = place.rpartition(":")
    if kind == "unix":
        return unix_address(place)
    if kind != "tcp" or not port.isdecimal():
        raise UsageError(f"{endpoint!r} is not an address", hint="unix:<path> or tcp:<host>:<port>")
    return host, int(port)


# --- blocking ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Listener:
    """A listening socket, and the endpoint by which others connect to it."""

    sock: socket.socket
    endpoint: str
    path: Path | None = None

    def accept(self) -> socket.socket:
        """Accept the next connection. Raises `OSError`; `ConnectionAbortedError` if it came from another user."""
        sock = keep_from_forks(self.sock.accept()[0])
        if not is_own(sock):
            sock.close()
            refused.add(self.path.name if self.path is not None else "", "it is of another user")
            raise ConnectionAbortedError(errno.ECONNABORTED, "another user called")
        context = tls.serving() if self.path is None else None
        return sock if context is None else tunnel.called(sock, context)

    def close(self) -> None:
        """Stop listening; wakes a thread that is blocked in `accept`."""
        hang_up(self.sock)
        self.sock.close()
        if self.path is not None and not str(self.path).startswith("@"):
            self.path.unlink(missing_ok=True)


def listen(
    name: str, folder: str | Path | None, *, bind: str = "", advertise: str = "", backlog: int = _BACKLOG
) -> Listener:
    """Listen on a unix socket in a private folder or, if there is no folder, on any TCP port.

    Args:
        name: start of the socket's name in the folder; a unique end is added.
        folder: a private folder, or the prefix from `sockets_home`; None if other nodes must reach the socket.
        bind: the address to listen on, without a folder.
        advertise: the host name by which other nodes reach this one.
        backlog: how many connections may wait to be accepted.

    Raises `OSError`, or `UsageError` if the folder's path is too long.
    """
    if folder is None:
        family = socket.AF_INET6 if ":" in bind else socket.AF_INET
        sock = keep_from_forks(socket.create_server((bind, 0), family=family, backlog=backlog))
        return Listener(sock, f"tcp:{advertise}:{sock.getsockname()[1]}")
    path = Path(folder) / f"{name}-{os.getpid()}-{secrets.token_hex(4)}"
    if len(os.fsencode(path)) > LONGEST_UNIX_PATH:
        cause = f"the socket path {path} is longer than {LONGEST_UNIX_PATH} bytes"
        raise UsageError(cause, hint="choose a folder with a shorter path")
    sock = keep_from_forks(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    try:
        sock.bind(unix_address(path))
        sock.listen(backlog)
    except OSError:
        sock.close()
        raise
    return Listener(sock, f"unix:{path}", path)


def connect(
    endpoint: str, within: Seconds = CONNECT_S, *, opened: Callable[[socket.socket], object] = lambda sock: None
) -> socket.socket:
    """Connect a stream socket to an endpoint. Raises `OSError` or `UsageError`.

    Args:
        endpoint: the address to connect to.
        within: timeout of the connection, and of the socket's next calls.
        opened: gets the socket before it connects, so that another thread can end the attempt; also gets any later
            socket that replaces it.
    """
    place, failed = _place(endpoint), OSError(f"{endpoint} has no address")
    found = [(socket.AF_UNIX, place)] if isinstance(place, str) else _addresses(*place)
    context = None if isinstance(place, str) else tls.calling()
    for family, address in found:
        sock = keep_from_forks(socket.socket(family, socket.SOCK_STREAM))
        try:
            opened(sock)
            sock.settimeout(within)
            sock.connect(address)
            _own_end(sock, endpoint)
            if family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if context is not None:
                sock = tunnel.calling(sock, context, place[0])
                sock.settimeout(within)
                opened(sock)
            return sock
        except OSError as error:
            sock.close()
            failed = error
        except BaseException:
            sock.close()
            raise
    raise failed


def _addresses(host: str, port: int) -> list[tuple[socket.AddressFamily, Any]]:
    return [(family, address) for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


def hang_up(sock: socket.socket) -> None:
    """End the connection at once, also for a thread that is blocked in it; that thread then closes the socket."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        # It is not connected, or already closed: no thread is blocked in it.
        return


def widen(sock: socket.socket) -> None:
    """Enlarge the kernel's send buffer: with the default for unix sockets the two ends often wait for each other."""
    if sock.family == socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, WINDOW)
    else:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class ThreadServer:
    """Serves connections between `open` and `close`: one thread accepts, and each connection gets its own thread.

    A connection that is not marked as `known` within `strangers.HELLO_S` is closed; while there are at least
    `strangers.MOST` such connections, the oldest is closed sooner.

    Args:
        name: name of its threads.
        attend: serves one connection, which is closed when this function returns or raises.
    """

    def __init__(self, name: str, attend: Callable[[socket.socket], None]) -> None:
        self._name, self._attend = name, attend
        self._listener: Listener | None = None
        self._acceptor: threading.Thread | None = None
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._serving: dict[socket.socket, threading.Thread] = {}
        self._strangers: dict[socket.socket, Instant] = {}
        """Arrival times of the connections that are not known yet, the oldest first."""

    @property
    def closed(self) -> bool:
        """True if the server is closed."""
        return self._closed.is_set()

    def open(self, listener: Listener) -> str:
        """Start to serve the connections of this listener; returns its endpoint."""
        self._listener = listener
        self._acceptor = threading.Thread(target=self._accept, args=(listener,), name=self._name, daemon=True)
        self._acceptor.start()
        return listener.endpoint

    def close(self) -> None:
        """Close all connections, end all threads, remove the socket. May be called twice."""
        with self._lock:
            self._closed.set()
            serving = list(self._serving)
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()
        self.dismiss(serving)
        begun = self._acceptor is not None and self._acceptor.ident is not None  # else no thread could start
        if self._acceptor is not None and begun and self._acceptor is not threading.current_thread():
            self._acceptor.join(_END_S)

    def known(self, sock: socket.socket) -> None:
        """Mark a connection as known: its peer has proved that it belongs to the job."""
        with self._lock:
            self._strangers.pop(sock, None)

    def dismiss(self, connections: Iterable[socket.socket]) -> None:
        """Close these connections, and wait until their threads have ended."""
        with self._lock:
            late = [(sock, self._serving[sock]) for sock in connections if sock in self._serving]
        for sock, _ in late:
            hang_up(sock)
        for _, thread in late:
            if thread is not threading.current_thread():
                thread.join(_END_S)

    def _accept(self, listener: Listener) -> None:
        while True:
            try:
                listener.sock.settimeout(self._close_unidentified())
                sock = listener.accept()
            except (TimeoutError, ConnectionAbortedError):
                continue
            except OSError as error:
                # Most likely no descriptors are left: give other connections time to end.
                if self._closed.wait(_PAUSE_S):
                    return
                _log.warning("%s: a connection could not be accepted: %s", self._name, error)
                continue
            thread = threading.Thread(target=self._serve, args=(sock,), name=f"{self._name}-serves", daemon=True)
            with self._lock:
                if self._closed.is_set():
                    sock.close()
                    return
                self._serving[sock] = thread
                self._strangers[sock] = time.monotonic()
                try:
                    thread.start()  # under the lock, so that a thread that finds it in the table can join it
                except RuntimeError as error:
                    del self._serving[sock], self._strangers[sock]
                    sock.close()  # the caller may try again later, when a thread can be started
                    _log.warning("%s: a connection cannot be served: %s", self._name, error)

    def _close_unidentified(self) -> Seconds | None:
        """Close connections that stayed unknown too long; returns the time to the next check, None if none is left."""
        while True:
            with self._lock:
                oldest = next(iter(self._strangers.items()), None)
                crowded = len(self._strangers) >= MOST
                if oldest is None:
                    return None
                sock, since = oldest
                left = since + (TURN_S if crowded else HELLO_S) - time.monotonic()
                if left <= 0.0:
                    del self._strangers[sock]
                    hang_up(sock)  # under the lock, so that nobody else closes it and gives its descriptor away
            if left <= 0.0:
                refused.add(self._name.removeprefix("regrow-"), "a client that did not identify itself")
            elif not crowded:
                return left
            elif self._closed.wait(left):
                return None

    def _serve(self, sock: socket.socket) -> None:
        try:
            widen(sock)
            self._attend(sock)
        except ProtocolError as error:
            refused.add(self._name.removeprefix("regrow-"), error)
        except (OSError, EOFError, RegrowError) as error:
            if not self._closed.is_set():
                _log.info("%s: a connection ended: %s", self._name, error)
        finally:
            with self._lock:
                self._serving.pop(sock, None)
                self._strangers.pop(sock, None)
            sock.close()


# --- in an event loop ----------------------------------------------------------------------------------------------


async def open_connection(protocol: Callable[[], Speaking], endpoint: str) -> Speaking:
    """Connect to an endpoint in an event loop; returns the connection's protocol. Raises `OSError` or `UsageError`."""
    place, loop = _place(endpoint), asyncio.get_running_loop()
    if isinstance(place, str):
        transport, speaking = await loop.create_unix_connection(protocol, place)
        try:
            _own_end(transport.get_extra_info("socket"), endpoint)
        except OSError:
            transport.abort()
            raise
    else:
        _, speaking = await loop.create_connection(protocol, *place, ssl=tls.calling())
    return speaking


async def serve(
    protocol: Callable[[], asyncio.Protocol], path: Path | None, *, bind: str, advertise: str
) -> tuple[asyncio.Server, str]:
    """Serve connections to a unix socket or, if `path` is None, to any TCP port. Returns the server and its endpoint.

    The protocol must call `is_own` when a connection is made.
    """
    loop = asyncio.get_running_loop()
    if path is not None:
        if not str(path).startswith("@"):
            path.unlink(missing_ok=True)
        return await loop.create_unix_server(protocol, unix_address(path)), f"unix:{path}"
    server = await loop.create_server(protocol, bind, 0, ssl=tls.serving())
    return server, f"tcp:{advertise}:{server.sockets[0].getsockname()[1]}"
