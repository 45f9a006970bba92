"""HTTP between processes of a job: callers and servers, encrypted where `core/tls.py` says."""

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
"""A handshake takes some turns of both ends, which may be busy."""
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_PAUSE_S: Seconds = 0.1
_AT_ONCE = 64
_IDLE_S: Seconds = 30.0
"""Between two requests of one who is not admitted by name."""
_IDLE_LONG_S: Seconds = 3630.0
_HEAD_ENDS = b"\r\n\r\n"


def session(**options: Any) -> aiohttp.ClientSession:
    """`aiohttp.ClientSession` for calls to `tls.url(...)`. Raises `UsageError`."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=tls.calling() or True), **options)


async def is_only_silent(url: str, within: Seconds) -> bool:
    """True if calls there fail for want of a TLS handshake only: the machine takes them, its process is paused.

    Without TLS a call succeeds as soon as the machine has taken it, so there is nothing more to find out.
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
    """Whoever calls from now on finds nobody; connections that there are stay."""
    for site in list(runner.sites) if runner is not None else ():
        await site.stop()


async def close(runner: web.AppRunner | None) -> None:
    """Hang up on everybody."""
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
    """Serve there; the port. Raises `OSError` or `UsageError`.

    Args:
        runner: of the application, set up.
        host: the address to listen on.
        port: 0: any.
        reuse: also while connections of a former server are being closed.
        backlog: how many may wait to be let in.
        anybody: whether who has no certificate may call too.
        endpoint: where those are counted that are hung up on.
        strict: whether the application says by `admit` who belongs here; else whoever says a whole request does.
    """
    context = tls.serving(anybody=anybody)
    server = runner.server
    if server is None:
        raise RuntimeError("the runner is not set up")
    sockets = await _bound(host, port, reuse)
    await _Site(runner, HttpListener(server, sockets, context, name=endpoint, strict=strict), backlog).start()
    return int(runner.addresses[0][1])


class Caller:
    """Somebody at the door.

    Args:
        listener: where.
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
        """A part of what it says. False: its request's head is longer than anybody's."""
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
        """It may stay as long as it likes."""
        self.listener.forget(self)

    def hang_up(self, why: str) -> None:
        """It is one of those who have no business here."""
        self.listener.forget(self)
        refused.add(self.listener.name, why)
        if self.transport is not None:
            self.transport.abort()
        elif self.task is not None:
            self.task.cancel()


class _Handler(web.RequestHandler):
    """aiohttp's, which tells the door what it hears. Its answer to what is no request is short, whatever was said."""

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
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if status != web.HTTPBadRequest.status_code:
            return super().handle_error(request, status, exc, message)
        refused.add(self.caller.listener.name, "what is no request")
        response = web.Response(status=status, text="this is no request\n")
        response.force_close()
        return response


class HttpListener:
    """Lets callers in: the sockets of a site, as a server that `web.BaseSite` can close.

    At most `MOST` of those of whom it is not known yet who they are, each for `HELLO_S`. While others wait outside, the
    one that has been silent longest gives way as soon as it has had its turn, and so it does where descriptors run out.

    Args:
        server: aiohttp's, of the application.
        sockets: bound, and not listening yet.
        context: for TLS; None: none.
        name: where those are counted that are hung up on.
        strict: whether callers have to be admitted by the application; else by the whole head of a request.
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
        """In the order in which they came."""
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
        """Listen no more; who is admitted stays."""
        if self._closed:
            return
        self._closed = True
        for each in self.sockets:
            self._loop.remove_reader(each)
            each.close()
        for caller in list(self.waiting):
            if caller.transport is None and caller.task is not None:
                caller.task.cancel()  # in the middle of its handshake
        self.sockets = []

    def forget(self, caller: Caller) -> None:
        """It is admitted, or gone."""
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
            self._loop.call_later(HELLO_S, caller.hang_up, f"somebody who said nothing whole within {HELLO_S:g} s"),
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
        except (OSError, TimeoutError) as error:  # no handshake, or it has gone
            if caller.transport is None:
                self.forget(caller)
                refused.add(self.name, f"a connection: {error}")

    def _lost(self, caller: Caller, error: BaseException) -> None:
        """A defect of the server's struck one call; the others are served."""
        self.forget(caller)
        refused.add(self.name, f"a call that failed by {type(error).__name__}: {error}")

    def _had_turn(self, caller: Caller) -> None:
        """Note that two turns of the loop have passed, so all that the caller had sent by then was read."""
        caller.had_turn = True
        if caller in self.waiting:
            self._go_on()

    def _make_place(self, *, at_once: bool = False) -> bool:
        """Hang up on the one that has been silent longest, if it has had its turn."""
        oldest = next(iter(self.waiting), None)
        if oldest is None or not (oldest.had_turn or at_once):
            return False
        oldest.hang_up("somebody who said nothing while others waited")
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
    """A door that is open as long as its runner says."""

    def __init__(self, runner: web.AppRunner, listener: HttpListener, backlog: int) -> None:
        super().__init__(runner, backlog=backlog)
        self._listener = listener

    @property
    def name(self) -> str:
        """For aiohttp's own lists."""
        return self._listener.name

    async def start(self) -> None:
        """Listen. Raises `OSError`."""
        await super().start()
        self._server = cast(asyncio.AbstractServer, self._listener)
        self._listener.open(self._backlog)


def admit(request: web.Request) -> None:
    """Let the sender of this request stay: it belongs here."""
    if isinstance(request.protocol, _Handler):
        request.protocol.caller.admit()


async def _bound(host: str, port: int, reuse: bool | None) -> list[socket.socket]:
    """Sockets of an address, as asyncio makes them, which do not listen yet. Raises `OSError`."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(asyncio.Protocol, host, port, reuse_address=reuse, start_serving=False)
    made = [socket.socket(fileno=os.dup(each.fileno())) for each in server.sockets]
    server.close()
    for each in made:
        each.setblocking(False)
    return made
