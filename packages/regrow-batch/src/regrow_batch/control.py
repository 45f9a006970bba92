"""HTTP control of a running batch: lists its workers, adds them and removes them. Requests carry the head's token.

The server always listens on loopback, for users who may read the head's file; with `--listen`, also for other machines.
"""

import asyncio
import os
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, Request, build_opener

import msgspec
from aiohttp import web

from regrow.core.errors import UsageError
from regrow.core.hosts import LOOPBACK, address_of
from regrow.core.ids import Seconds
from regrow.core.net import same_secret
from regrow_batch.attendance import RENEW_S, Attendance
from regrow_batch.members import address
from regrow_batch.places import BatchStopped
from regrow_batch.pool import Pool

PATH = "/workers"
WAIT_S: Seconds = 10.0
OVER = "all rows of the batch are done"
SENT_AWAY = "it was asked to go"


class ControlEndpoint(msgspec.Struct):
    """Address of a running head. Only the user who runs it may read the file."""

    port: int
    token: str

    @property
    def url(self) -> str:
        """Its address on this machine."""
        return f"http://{LOOPBACK}:{self.port}"


class WorkerRequest(msgspec.Struct):
    """Request about a worker.

    Attributes:
        url: its base address.
        leave: whether the worker is to leave the pool, or to join it.
        cap: most rows at once; 0: the job's own.
        grace: seconds that it has for leaving; None: the job's own.
        lease: time that it belongs to the pool unless the request is repeated; 0: until it is asked to leave.
        again: the same request was sent before.
    """

    url: str
    leave: bool = False
    cap: int = 0
    grace: Seconds | None = None
    lease: Seconds = 0.0
    again: bool = False


class PoolView(msgspec.Struct):
    """A worker as clients see it."""

    url: str
    standing: str
    rows: int
    cap: int
    done: int
    retried: int
    because: str


def read_endpoint(path: Path) -> ControlEndpoint:
    """Read the address of an output's head. Raises `UsageError`."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=ControlEndpoint)
    except (OSError, msgspec.DecodeError) as error:
        raise UsageError(f"no batch runs that writes to {path.name.removesuffix('.control')}: {error}") from error


class _ControlApi:
    """Answers requests."""

    def __init__(self, pool: Pool, attendance: Attendance, token: str) -> None:
        self._pool, self._attendance, self._token = pool, attendance, token
        self.over = False
        self.notified = asyncio.Event()

    async def answer(self, request: web.Request) -> web.Response:
        if not same_secret(request.headers.get("Authorization", ""), f"Bearer {self._token}"):
            raise web.HTTPUnauthorized
        if request.method != "POST":
            return self._list([*self._pool.workers])
        try:
            asked = msgspec.json.decode(await request.read(), type=WorkerRequest)
            url = address(asked.url, "the request")
        except (msgspec.DecodeError, UsageError) as error:
            return web.Response(status=400, text=str(error))
        if asked.leave:
            if not self._attendance.drain(url, asked.grace, leased=asked.lease > 0):
                return web.Response(status=404, text=f"there is no worker {url}")
        elif asked.lease > 0:
            if gone := self._renew(url, asked):
                return web.Response(status=410, text=gone)
        else:
            self._attendance.join(url, asked.cap)
        # Many workers renew their leases: the reply lists only the worker that asked.
        return self._list([url] if asked.lease > 0 else [*self._pool.workers])

    def _renew(self, url: str, asked: WorkerRequest) -> str:
        """Register or renew a worker. Returns why it may end; empty: it belongs to the pool."""
        if self.over:
            self._attendance.leases.pop(url, None)
            if not self._attendance.leases:
                self.notified.set()
            return OVER
        return "" if self._attendance.renew(url, asked.cap, asked.lease, again=asked.again) else SENT_AWAY

    def _list(self, urls: list[str]) -> web.Response:
        body = msgspec.json.encode([_view(self._pool, url) for url in urls if url in self._pool.workers])
        return web.Response(body=body, content_type="application/json")

    async def notify_all(self) -> None:
        """Tell the registered workers that no work is left. Waits no longer than they may be late."""
        self.over = True
        if self._attendance.leases:
            try:
                await asyncio.wait_for(self.notified.wait(), 2 * RENEW_S)
            except TimeoutError:
                return


@asynccontextmanager
async def serve(
    path: Path, pool: Pool, attendance: Attendance, *, listen: tuple[str, int] | None = None, token: str = ""
) -> AsyncIterator[str]:
    """Listen while the job runs; yields the address at which other machines reach the head.

    Args:
        path: the file for the address and the token, readable by this user alone.
        pool: the workers.
        attendance: carries out requests to join and to leave.
        listen: an address for other machines, besides loopback.
        token: that requests must carry; empty: a random one.

    Raises `UsageError` if the address cannot be bound, `BatchStopped` if the file cannot be written.
    """
    endpoint = ControlEndpoint(0, token or secrets.token_urlsafe(24))
    api = _ControlApi(pool, attendance, endpoint.token)
    app = web.Application()
    app.router.add_route("*", PATH, api.answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, LOOPBACK, 0).start()
        endpoint.port = int(runner.addresses[0][1])
        where = endpoint.url
        if listen is not None:
            where = await _listen_there(runner, *listen)
        _write(path, msgspec.json.encode(endpoint))
        yield where
        await api.notify_all()
    finally:
        await asyncio.shield(runner.cleanup())
        path.unlink(missing_ok=True)


async def _listen_there(runner: web.AppRunner, host: str, port: int) -> str:
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        raise UsageError(
            f"--listen {address_of(host, port)}: {error.strerror or error}",
            hint="choose another port, or end the process that uses it",
        ) from error
    return f"http://{address_of(host, int(runner.addresses[-1][1]))}"


def _write(path: Path, content: bytes) -> None:
    """Write a file that only its user may read. Raises `BatchStopped`."""
    try:
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)
    except OSError as error:
        raise BatchStopped(
            f"{path} cannot be written: {error.strerror}", hint="make room, then run it again"
        ) from error


def _view(pool: Pool, url: str) -> PoolView:
    worker = pool.workers[url]
    because = "" if worker.has_room or worker.rows else worker.because
    return PoolView(url, str(worker.standing), worker.rows, worker.cap, worker.done, worker.retried, because)


def ask(path: Path, asked: WorkerRequest | None) -> list[PoolView]:
    """Ask a running head for its workers, or send a request about one. Raises `UsageError`."""
    endpoint = read_endpoint(path)
    request = Request(
        f"{endpoint.url}{PATH}",
        data=None if asked is None else msgspec.json.encode(asked),
        headers={"Authorization": f"Bearer {endpoint.token}"},
    )
    try:
        with build_opener(ProxyHandler({})).open(request, timeout=WAIT_S) as answer:
            return msgspec.json.decode(answer.read(), type=list[PoolView])
    except HTTPError as error:
        raise UsageError(error.read().decode(errors="replace") or str(error)) from error
    except (URLError, OSError) as error:
        raise UsageError(f"the batch does not answer: {error}", hint="it may have ended; run it again") from error
