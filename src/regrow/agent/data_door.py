"""The data cache's door: producers of other nodes fetch entries here, and leave what their node needs next.

    GET /data                                       identities, a list
    GET /data/<identity>                            names of entries to their bytes
    GET /data/<identity>/<name>                     the file
    GET /data/mirror/<node>                         what is kept for a node: identities to names to bytes
    PUT /data/mirror/<node>/<identity>/<name>?step=N&keep_from=M    keeps it; `keep_from`: what is older can go

Every request carries the job's token. What comes in is not looked into: whoever fetches an entry checks it.
"""

import asyncio
import contextlib
import hmac
import logging
import os
import re
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import BinaryIO

from aiohttp import web

from regrow.agent.data_mirror import Mirror, Place
from regrow.core.config import AgentConfig
from regrow.core.errors import UsageError
from regrow.core.ids import Seconds

IDENTITY = re.compile(r"[0-9a-f]{32}")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,119}\.entry")
NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_STEP = re.compile(r"\d{1,18}", re.ASCII)
_PART_BYTES = 1 << 20
_UPLOAD_S: Seconds = 5.0
_UPLOAD_BYTES_S = 4 << 20
"""An upload may take `_UPLOAD_S`, and a second more for so many bytes."""
_UPLOADS = 4
"""At once; more are told to come again."""
_CLOSE_S: Seconds = 0.5
_LONGEST_UNIX_PATH = 107
_log = logging.getLogger("regrow.agent")

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class DataDoor:
    """Listens between `open` and `close`, on the agent's loop.

    Args:
        config: where all nodes are on this machine a unix socket is made, else it is TCP on `bind`.
    """

    def __init__(self, config: AgentConfig) -> None:
        self._config = config
        self._secret = f"Bearer {config.token}".encode()
        self._folder = Path(config.data_dir)
        self._mirror = Mirror(self._folder, budget=config.data_mirror, nodes=config.facts.node_limit)
        self._uploads = 0
        self._runner: web.AppRunner | None = None

    async def open(self) -> str:
        """Listen; returns the endpoint. Raises `OSError`, or `UsageError` where the socket's path is too long."""
        app = web.Application(middlewares=[self._guard])
        app.router.add_get("/data", self._serve_identities)
        app.router.add_get("/data/mirror/{node}", self._serve_mirrored)
        app.router.add_get("/data/{identity}", self._serve_names)
        app.router.add_get("/data/{identity}/{name}", self._serve_entry)
        app.router.add_put("/data/mirror/{node}/{identity}/{name}", self._take_entry)
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=_CLOSE_S)
        await self._runner.setup()
        try:
            return await self._listen(self._runner)
        except BaseException:
            await self.close()
            raise

    async def _listen(self, runner: web.AppRunner) -> str:
        config = self._config
        if config.one_machine:
            path = Path(config.socket_dir) / f"data-door-{secrets.token_hex(4)}"
            if len(os.fsencode(path)) > _LONGEST_UNIX_PATH:
                raise UsageError(f"the socket path {path} is too long", hint="choose a shorter XDG_RUNTIME_DIR")
            await web.UnixSite(runner, str(path)).start()
            return f"unix:{path}"
        await web.TCPSite(runner, config.bind, 0).start()
        return f"tcp:{config.advertise}:{runner.addresses[0][1]}"

    async def close(self) -> None:
        """Hang up on everybody. May be called twice."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    @web.middleware
    async def _guard(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(given, self._secret):
            return web.Response(status=401, text="the token is not this job's\n")
        try:
            return await handler(request)
        except OSError as error:
            _log.info("%s %s: %s", request.method, request.path, error)
            return web.Response(status=503, text=f"{error.strerror or error}\n")

    # --- out -------------------------------------------------------------------------------------------------------

    async def _serve_identities(self, request: web.Request) -> web.Response:
        own = await asyncio.to_thread(_identities, self._folder)
        return web.json_response(sorted(own | self._mirror.identities()))

    async def _serve_names(self, request: web.Request) -> web.Response:
        (identity,) = _words(request, identity=IDENTITY)
        own = await asyncio.to_thread(_entries, self._folder / identity)
        return web.json_response(self._mirror.entries(identity) | own)

    async def _serve_mirrored(self, request: web.Request) -> web.Response:
        (node,) = _words(request, node=NODE)
        return web.json_response(self._mirror.kept_for(node))

    async def _serve_entry(self, request: web.Request) -> web.StreamResponse:
        identity, name = _words(request, identity=IDENTITY, name=NAME)
        own = self._folder / identity / name
        path = own if await asyncio.to_thread(own.is_file) else self._mirror.find(identity, name)
        if path is None:
            raise web.HTTPNotFound(text="there is no such entry here\n")
        return web.FileResponse(path)

    # --- in --------------------------------------------------------------------------------------------------------

    async def _take_entry(self, request: web.Request) -> web.Response:
        node, identity, name = _words(request, node=NODE, identity=IDENTITY, name=NAME)
        place = Place(node, identity, name, _number(request, "step"))
        keep_from = _number(request, "keep_from")
        size = request.content_length
        if size is None:
            raise web.HTTPLengthRequired(text="say how long it is\n")
        if self._uploads >= _UPLOADS:
            return web.Response(status=503, text="others leave entries just now\n")
        path = self._mirror.reserve(place, size, keep_from)
        if path is None:
            return web.Response(status=507, text=f"no room for {size} bytes of {node}\n")
        self._uploads += 1
        try:
            await asyncio.wait_for(_receive(request, path, size), _UPLOAD_S + size / _UPLOAD_BYTES_S)
        except TimeoutError:
            self._mirror.cancel(place, size)
            return web.Response(status=408, text="it took too long\n")
        except BaseException:
            self._mirror.cancel(place, size)
            raise
        finally:
            self._uploads -= 1
        self._mirror.keep(place, size)
        return web.Response(status=201)


def _words(request: web.Request, **patterns: re.Pattern[str]) -> list[str]:
    """The parts of the address, each as it must be. Raises 404 for any other."""
    words = [request.match_info[name] for name in patterns]
    if all(pattern.fullmatch(word) for word, pattern in zip(words, patterns.values(), strict=True)):
        return words
    raise web.HTTPNotFound(text="there is nothing of that name\n")


def _number(request: web.Request, name: str) -> int:
    text = request.query.get(name, "")
    if _STEP.fullmatch(text) is None:
        raise web.HTTPBadRequest(text=f"{name} is no step\n")
    return int(text)


async def _receive(request: web.Request, path: Path, size: int) -> None:
    """The body, whole, under its name. Raises `OSError`, or 400 where it is not as long as it says."""
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    file = await asyncio.to_thread(_create, draft)
    try:
        with file:
            got = 0
            async for part in request.content.iter_chunked(_PART_BYTES):
                got += len(part)
                if got > size:
                    break
                await asyncio.to_thread(file.write, part)
        if got != size:
            raise web.HTTPBadRequest(text=f"{got} bytes came instead of {size}\n")
        draft.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise


def _create(path: Path) -> BinaryIO:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path.open("xb")


def _identities(folder: Path) -> set[str]:
    with os.scandir(folder) as found:
        return {each.name for each in found if IDENTITY.fullmatch(each.name) and each.is_dir(follow_symlinks=False)}


def _entries(folder: Path) -> dict[str, int]:
    sizes: dict[str, int] = {}
    try:
        with os.scandir(folder) as found:
            for each in found:
                if NAME.fullmatch(each.name) is not None:
                    with contextlib.suppress(FileNotFoundError):  # it was evicted meanwhile
                        sizes[each.name] = each.stat(follow_symlinks=False).st_size
    except FileNotFoundError:
        return {}
    return sizes
