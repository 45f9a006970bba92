"""Lists workers of a running batch, takes them in and lets them go: HTTP on loopback, for whoever may read its file."""

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
from regrow.core.ids import Seconds
from regrow.core.net import same_secret
from regrow.infer.batch.attendance import Attendance
from regrow.infer.batch.members import address
from regrow.infer.batch.places import BatchStopped
from regrow.infer.batch.pool import Pool

_PATH = "/workers"
_WAIT_S: Seconds = 10.0


class Door(msgspec.Struct):
    """Where a running head listens. Only its user may read the file."""

    port: int
    token: str


class WorkerWish(msgspec.Struct):
    """What is wanted of a worker. `grace`: seconds; None: the job's own."""

    url: str
    leave: bool = False
    cap: int = 0
    grace: Seconds | None = None


class PoolView(msgspec.Struct):
    """A worker as others are told of it."""

    url: str
    standing: str
    rows: int
    cap: int
    done: int
    retried: int
    because: str


@asynccontextmanager
async def serve(path: Path, pool: Pool, attendance: Attendance) -> AsyncIterator[None]:
    """Listen while the job runs; `path` says where."""
    token = secrets.token_urlsafe(24)

    async def answer(request: web.Request) -> web.Response:
        if not same_secret(request.headers.get("Authorization", ""), f"Bearer {token}"):
            raise web.HTTPUnauthorized
        if request.method == "POST":
            try:
                wish = msgspec.json.decode(await request.read(), type=WorkerWish)
                url = address(wish.url, "the request")
            except (msgspec.DecodeError, UsageError) as error:
                return web.Response(status=400, text=str(error))
            if not wish.leave:
                attendance.join(url, wish.cap)
            elif not attendance.drain(url, wish.grace):
                return web.Response(status=404, text=f"there is no worker {url}")
        body = msgspec.json.encode([_view(pool, url) for url in pool.workers])
        return web.Response(body=body, content_type="application/json")

    app = web.Application()
    app.router.add_route("*", _PATH, answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = int(runner.addresses[0][1])
        _write(path, msgspec.json.encode(Door(port, token)))
        yield
    finally:
        await asyncio.shield(runner.cleanup())
        path.unlink(missing_ok=True)


def _write(path: Path, content: bytes) -> None:
    """A file for its user alone. Raises `BatchStopped`."""
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


def ask(path: Path, wish: WorkerWish | None) -> list[PoolView]:
    """Ask a running head for its workers, or something of one. Raises `UsageError`."""
    try:
        door = msgspec.json.decode(path.read_bytes(), type=Door)
    except (OSError, msgspec.DecodeError) as error:
        raise UsageError(f"no batch runs that writes to {path.name.removesuffix('.control')}: {error}") from error
    request = Request(
        f"http://127.0.0.1:{door.port}{_PATH}",
        data=None if wish is None else msgspec.json.encode(wish),
        headers={"Authorization": f"Bearer {door.token}"},
    )
    try:
        with build_opener(ProxyHandler({})).open(request, timeout=_WAIT_S) as answer:
            return msgspec.json.decode(answer.read(), type=list[PoolView])
    except HTTPError as error:
        raise UsageError(error.read().decode(errors="replace") or str(error)) from error
    except (URLError, OSError) as error:
        raise UsageError(f"the batch does not answer: {error}", hint="it may have ended; run it again") from error
