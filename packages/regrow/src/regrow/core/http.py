"""HTTP between processes of a job: clients and servers, encrypted as `core/tls.py` describes."""

import asyncio
import errno
import os
import socket
import ssl
from collections.abc import Sequence
from typing import Any, cast
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web

from regrow.core import tls
from regrow.core.ids import Seconds
from regrow.core.process.tasks import supervised
from regrow.core.strangers import HELLO_S, MOST, refused

HEAD_BYTES = 64 << 10
_TURN_S: Seconds = 0.02
_TURN_TLS_S: Seconds = 0.5
"""Like `_TURN_S`, with TLS: the handshake takes several round trips, and both ends may be busy."""
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_PAUSE_S: Seconds = 0.1
_AT_ONCE = 64
_IDLE_S: Seconds = 30.0
"""Longest pause between two requests of a caller that the application has not admitted by `admit`."""
_IDLE_LONG_S: Seconds = 3630.0
_HEAD_ENDS = b"\r\n\r\n"


def session(**options: Any) -> aiohttp.ClientSession:
    """An `aiohttp.ClientSession` for calls to URLs from `tls.url`. Raises `UsageError`."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=tls.calling() or True), **options)


async def is_only_silent(url: str, within: Seconds) -> bool:
    """True if the server accepts connections but does no TLS handshake: its machine runs, but its process is paused.

    False without TLS, where a call succeeds as soon as the machine has accepted it: nothing more can be learned.
    """
    parts = urlsplit(url)
    if parts.scheme != "https":
        return False
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(parts.hostname, parts.port), within)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


async def stop_listening(runner: web.AppRunner | None) -> None:
    """Accept no new connections; open ones stay open."""
    for site in list(runner.sites) if runner is not None else ():
        await site.stop()


async def close(runner: web.AppRunner | None) -> None:
    """Close all connections."""
    if runner is not None:
        await runner.cleanup()


async def listen(
    runner: web.AppRunner,
    host: str,
    port: int,
    *,
    reuse: bool | None = None,
    backlog: int = 128,
    anybody: bool = False,
    endpoint: str = "http",
    strict: bool = False,
) -> int:
    """Serve at this address; returns the port. Raises `OSError` or `UsageError`.

    Args:
        runner: runner of the application, already set up.
        host: the address to listen on.
        port: the port; 0: any free one.
        reuse: whether to listen while connections of a former server are still being closed.
        backlog: how many connections may wait to be accepted.
        anybody: whether callers without a certificate may connect too.
        endpoint: name under which refused connections are counted.
        strict: whether the application admits callers by `admit`; else a caller that sends a whole request is admitted.
    """
    context = tls.serving(anybody=anybody)
    server = runner.server
    if server is None:
        raise RuntimeError("the runner is not set up")
    sockets = await _bound(host, port, reuse)
    await _Site(runner, HttpListener(server, sockets, context, name=endpoint, strict=strict), backlog).start()
    return int(runner.addresses[0][1])


class Caller:
    """A connection whose caller is not identified yet.

    Args:
        listener: the listener that accepted the connection.
    """

    def __init__(self, listener: "HttpListener") -> None:
        self.listener = listener
        self.task: asyncio.Task[None] | None = None
        self.transport: asyncio.Transport | None = None
        self.timers: list[asyncio.TimerHandle] = []
        self.had_turn = False
        self._received = 0
        self._tail = b""

    def receives(self, data: bytes) -> bool:
        """Take more received bytes into account. False: the request's head is longer than allowed."""
        if self not in self.listener.waiting or self._received < 0:
            return True
        if _HEAD_ENDS in self._tail + data:
            self._received = -1
            if not self.listener.strict:
                self.admit()
            return True
        self._tail = (self._tail + data)[-len(_HEAD_ENDS) + 1 :]
        self._received += len(data)
        return self._received <= HEAD_BYTES

    def admit(self) -> None:
        """Mark the caller as identified: the connection may stay open from now on."""
        self.listener.forget(self)

    def hang_up(self, why: str) -> None:
        """Close the connection and count it as refused, with the reason `why`."""
        self.listener.forget(self)
        refused.add(self.listener.name, why)
        if self.transport is not None:
            self.transport.abort()
        elif self.task is not None:
            self.task.cancel()


class _Handler(web.RequestHandler):
    """aiohttp's handler, which reports received bytes to its `Caller`. A malformed request gets a short answer."""

    def __init__(self, server: web.Server, caller: Caller, **options: Any) -> None:
        super().__init__(server, **options)
        self.caller = caller

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if isinstance(transport, asyncio.Transport):
            self.caller.transport = transport
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self.caller.receives(data):
            super().data_received(data)
        else:
            self.caller.hang_up("a request whose head does not end")

    def connection_lost(self, exc: BaseException | None) -> None:
        self.caller.admit()
        super().connection_lost(exc)

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        if status != web.HTTPBadRequest.status_code:
            return super().handle_error(request, status, exc, message)
        refused.add(self.caller.listener.name, "an invalid request")
        response = web.Response(status=status, text="invalid request\n")
        response.force_close()
        return response


class HttpListener:
    """Accepts connections on the sockets of a site, as a server that `web.BaseSite` can close.

    At most `MOST` connections may be unidentified, each for `HELLO_S`. While others wait to be accepted, the connection
    that was silent longest is closed as soon as it has had its turn; when descriptors run out, at once.

    Args:
        server: aiohttp's server of the application.
        sockets: bound, and not listening yet.
        context: for TLS; None: no encryption.
        name: name under which refused connections are counted.
        strict: whether the application must admit callers; else a complete request head admits them.
    """

    def __init__(
        self,
        server: web.Server,
        sockets: Sequence[socket.socket],
        context: ssl.SSLContext | None,
        *,
        name: str,
        strict: bool,
    ) -> None:
        self.name, self.strict, self.sockets = name, strict, list(sockets)
        self.waiting: dict[Caller, None] = {}
        """Unidentified connections, in the order of arrival."""
        self._server, self._context = server, context
        self._idle = _IDLE_LONG_S if strict else _IDLE_S
        self._loop = asyncio.get_running_loop()
        self._paused = False
        self._closed = False

    def open(self, backlog: int) -> None:
        """Listen. Raises `OSError`."""
        for each in self.sockets:
            each.listen(backlog)
            self._loop.add_reader(each, self._accept, each)

    def close(self) -> None:
        """Stop listening; admitted connections stay open."""
        if self._closed:
            return
        self._closed = True
        for each in self.sockets:
            self._loop.remove_reader(each)
            each.close()
        for caller in list(self.waiting):
            if caller.transport is None and caller.task is not None:
                caller.task.cancel()  # closed in the middle of its handshake
        self.sockets = []

    def forget(self, caller: Caller) -> None:
        """Stop the timers of a connection that was admitted or has ended."""
        for timer in caller.timers:
            timer.cancel()
        caller.timers.clear()
        if self.waiting.pop(caller, self) is None:
            self._go_on()

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(MOST):
            if len(self.waiting) >= MOST and not self._make_place():
                self._pause()
                return
            try:
                connection, _ = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    raise
                if not self._make_place(at_once=True):
                    self._pause()
                    self._loop.call_later(_PAUSE_S, self._go_on)
                return
            self._take(connection)

    def _take(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        caller = Caller(self)
        self.waiting[caller] = None
        turn = _TURN_S if self._context is None else _TURN_TLS_S
        caller.timers = [
            self._loop.call_later(turn, self._loop.call_soon, self._loop.call_soon, self._had_turn, caller),
            self._loop.call_later(HELLO_S, caller.hang_up, f"a client with no whole request within {HELLO_S:g} s"),
        ]
        caller.task = supervised(
            self._serve(connection, caller), "taking a call", lambda _, error: self._lost(caller, error)
        )

    async def _serve(self, connection: socket.socket, caller: Caller) -> None:
        try:
            await self._loop.connect_accepted_socket(
                lambda: _Handler(self._server, caller, loop=self._loop, access_log=None, keepalive_timeout=self._idle),
                connection,
                ssl=self._context,
                ssl_handshake_timeout=None if self._context is None else HELLO_S,
            )
        except (OSError, TimeoutError) as error:  # the handshake failed, or the caller has gone
            if caller.transport is None:
                self.forget(caller)
                refused.add(self.name, f"a connection: {error}")

    def _lost(self, caller: Caller, error: BaseException) -> None:
        """Count a call that failed because of a defect of the server, which goes on serving other callers."""
        self.forget(caller)
        refused.add(self.name, f"a call that failed by {type(error).__name__}: {error}")

    def _had_turn(self, caller: Caller) -> None:
        """Note that two turns of the event loop have passed, so that all that the caller had sent by then was read."""
        caller.had_turn = True
        if caller in self.waiting:
            self._go_on()

    def _make_place(self, *, at_once: bool = False) -> bool:
        """Close the connection that was silent longest, if it has had its turn or `at_once`; True if one was closed."""
        oldest = next(iter(self.waiting), None)
        if oldest is None or not (oldest.had_turn or at_once):
            return False
        oldest.hang_up("a client that sent nothing while others waited")
        return True

    def _pause(self) -> None:
        if not self._paused:
            self._paused = True
            for each in self.sockets:
                self._loop.remove_reader(each)

    def _go_on(self) -> None:
        if self._paused and not self._closed:
            self._paused = False
            for each in self.sockets:
                self._loop.add_reader(each, self._accept, each)


class _Site(web.BaseSite):
    """A site whose listener stays open as long as the site's runner."""

    def __init__(self, runner: web.AppRunner, listener: HttpListener, backlog: int) -> None:
        super().__init__(runner, backlog=backlog)
        self._listener = listener

    @property
    def name(self) -> str:
        """Name of the site in aiohttp's own lists."""
        return self._listener.name

    async def start(self) -> None:
        """Listen. Raises `OSError`."""
        await super().start()
        self._server = cast(asyncio.AbstractServer, self._listener)
        self._listener.open(self._backlog)


def admit(request: web.Request) -> None:
    """Admit the sender of this request, which has proved that it belongs to the job."""
    if isinstance(request.protocol, _Handler):
        request.protocol.caller.admit()


async def _bound(host: str, port: int, reuse: bool | None) -> list[socket.socket]:
    """Sockets bound to an address as asyncio binds them, not listening yet. Raises `OSError`."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(asyncio.Protocol, host, port, reuse_address=reuse, start_serving=False)
    made = [socket.socket(fileno=os.dup(each.fileno())) for each in server.sockets]
    server.close()
    for each in made:
        each.setblocking(False)
    return made
