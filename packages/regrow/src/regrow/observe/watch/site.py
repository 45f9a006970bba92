"""Serves a job's metrics and its live page, read-only without the job's token. Its failures never end the job.

It runs in the coordinator's event loop, so its calls are short and its memory is limited: readers share one tick, and a
slow reader misses ticks and is then disconnected.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from importlib import resources
from types import TracebackType

import msgspec
from aiohttp import web

from regrow.core import http, tls
from regrow.core.clock import Clock, MonotonicClock
from regrow.core.hosts import address_of, answers_to
from regrow.core.ids import Seconds
from regrow.core.messages import facts
from regrow.core.metrics_text import CONTENT_TYPE
from regrow.core.process.tasks import supervised
from regrow.core.records import IncidentClosed, IncidentOpened, Record
from regrow.core.strangers import refused
from regrow.membership.server.http_replies import words_of
from regrow.observe.watch.acting import PageActions
from regrow.observe.watch.exposition import exposition
from regrow.observe.watch.frames import snapshot, tick
from regrow.observe.watch.present import Present

EVERY: Seconds = 0.5
"""Regular time between two ticks."""
_LEAST: Seconds = 0.1
"""Least time between two ticks after an event."""
MOST_READERS = 32
"""Most pages that are open at once."""
_PATIENCE: Seconds = 10.0
"""Time after which a reader that accepts no data is disconnected."""
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS = {"Cache-Control": "no-store", "Content-Security-Policy": _POLICY, "X-Content-Type-Options": "nosniff"}


class WatchSite:
    """Use as `async with WatchSite(host, port, say=...) as site`, and pass the coordinator's records to `site.feed`.

    If it cannot listen, it prints a warning and serves nothing.

    Args:
        host, port: address to listen on; port 0: any free port. Reading needs no secret.
        say: prints a sentence.
        actions: actions for holders of the job's token; None: none.
        every: seconds between two ticks.
        clock: the clock of the records.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        say: Callable[[str], None],
        actions: PageActions | None = None,
        every: Seconds = EVERY,
        clock: Clock | None = None,
    ) -> None:
        self.present = Present()
        self.port = 0
        """Port on which the site listens; 0: none."""
        self.readers = 0
        """Number of open pages."""
        self._host, self._asked = host, port
        self._say, self._every = say, every
        self._actions = [] if actions is None else actions.routes()
        self._clock = clock or MonotonicClock()
        self._runner: web.AppRunner | None = None
        self._ticking: asyncio.Task[None] | None = None
        self._next, self._hurry = asyncio.Event(), asyncio.Event()
        self._frame = b""
        self._closing = self._stopped = False

    async def __aenter__(self) -> "WatchSite":
        """Start to listen, if possible."""
        app = web.Application(middlewares=[self._guard])
        app.add_routes(
            [
                web.get("/", self._serve_page),
                web.get("/watch.js", self._serve_script),
                web.get("/metrics", self._serve_metrics),
                web.get("/snapshot", self._serve_snapshot),
                web.get("/ticks", self._serve_ticks),
                *self._actions,
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=0.5)
        try:
            await self._runner.setup()
            self.port = await http.listen(
                self._runner, self._host, self._asked, reuse=True, anybody=True, endpoint="watch"
            )
        except OSError as error:
            await self._runner.cleanup()
            self._runner = None
            place = f"{self._host}:{self._asked}"
            self._say(f"--watch cannot listen on {place}: {words_of(error)}; the job goes on without it")
            return self
        self._ticking = supervised(self._tick(), "the live view", lambda _, error: self._stop(error))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Send a last tick to the readers, and disconnect them."""
        self._closing = True
        if self._ticking is not None:
            self._ticking.cancel()
            with suppress(Exception):  # an error in the last tick must not fail the job
                self._show()
        if self._runner is not None:
            await self._runner.cleanup()

    @property
    def address(self) -> str:
        """URL of the page; empty if the site does not listen."""
        return f"{tls.url(address_of(self._host, self.port))}/" if self.port else ""

    def feed(self, item: Record | facts.NodeProgress) -> None:
        """Add a fact or record of the coordinator."""
        if self._stopped:
            return
        try:
            self.present.feed(item)
            if isinstance(item, IncidentOpened | IncidentClosed):
                self._hurry.set()  # many incidents end before the next regular tick
        except Exception as error:  # noqa: BLE001 - no error here may end the job
            self._stop(error)

    async def _tick(self) -> None:
        while not self._stopped:
            await asyncio.sleep(min(_LEAST, self._every))
            with suppress(TimeoutError):
                await asyncio.wait_for(self._hurry.wait(), self._every - _LEAST)
            self._hurry.clear()
            self._show()

    def _stop(self, error: BaseException) -> None:
        self._stopped = True
        self._say(f"the live view has stopped: {type(error).__name__}: {error}; the job goes on without it")

    def _show(self) -> None:
        now = self._clock.now()
        self.present.fold(now)
        self.present.mark(now)
        if self.readers:
            self._frame = b"data: " + msgspec.json.encode(tick(self.present, now)) + b"\n\n"
        shown, self._next = self._next, asyncio.Event()
        shown.set()

    # --- answers -------------------------------------------------------------------------------------------------

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Confine errors to their request, and refuse requests under other host names (DNS rebinding)."""
        if not answers_to(self._host, request.url.host or ""):
            return web.Response(status=403, text=f"this is not {request.host}\n")
        try:
            return await handler(request)
        except web.HTTPException as error:
            return web.Response(status=error.status, text=f"{error.reason}\n")
        except Exception as error:  # noqa: BLE001 - as above
            return web.Response(status=500, text=f"{type(error).__name__}: {error}\n")

    async def _serve_page(self, request: web.Request) -> web.Response:
        return web.Response(body=_file("page.html"), content_type="text/html", charset="utf-8", headers=_HEADERS)

    async def _serve_script(self, request: web.Request) -> web.Response:
        return web.Response(body=_file("watch.js"), content_type="text/javascript", charset="utf-8", headers=_HEADERS)

    async def _serve_metrics(self, request: web.Request) -> web.Response:
        now = self._clock.now()
        self.present.fold(now)
        text = exposition(self.present, offset=time.time() - now, refused=refused.counts)
        return web.Response(body=text.encode(), headers={"Content-Type": CONTENT_TYPE, "Cache-Control": "no-store"})

    async def _serve_snapshot(self, request: web.Request) -> web.Response:
        body = msgspec.json.encode(snapshot(self.present, self._clock.now()))
        return web.Response(body=body, content_type="application/json", headers=_HEADERS)

    async def _serve_ticks(self, request: web.Request) -> web.StreamResponse:
        """Send the newest tick repeatedly, as server-sent events. A slow reader gets fewer ticks, without a queue."""
        if self.readers >= MOST_READERS or self._closing:
            return web.Response(status=503, text="too many readers\n", headers={"Retry-After": "10"})
        stream = web.StreamResponse(headers=_HEADERS | {"Content-Type": "text/event-stream"})
        self.readers += 1
        try:
            await stream.prepare(request)
            while not self._closing:
                await self._next.wait()
                if self._frame:
                    await asyncio.wait_for(stream.write(self._frame), _PATIENCE)
        except (ConnectionError, TimeoutError):
            if request.transport is not None:
                request.transport.abort()
        finally:
            self.readers -= 1
        return stream


def _file(name: str) -> bytes:
    return resources.files("regrow.observe.watch").joinpath(name).read_bytes()
