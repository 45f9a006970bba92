"""HTTP between processes of a job: callers and servers, encrypted where `core/tls.py` says."""

import asyncio
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web

from regrow.core import tls
from regrow.core.ids import Seconds


def session(**options: Any) -> aiohttp.ClientSession:
    """`aiohttp.ClientSession` for calls to `tls.url(...)`. Raises `UsageError`."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=tls.calling() or True), **options)


async def is_only_silent(url: str, within: Seconds) -> bool:
    """Whether calls that fail there fail for want of a TLS handshake: the machine takes them, its process is paused.

    Without TLS a call is made as soon as the machine has taken it, so there is nothing more to find out.
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
) -> int:
    """Serve there; the port. Raises `OSError` or `UsageError`.

    Args:
        runner: of the application, set up.
        host: the address to listen on.
        port: 0: any.
        reuse: also while connections of a former server are being closed.
        backlog: how many may wait to be let in.
        anybody: whether who has no certificate may call too.
    """
    context = tls.serving(anybody=anybody)
    site = web.TCPSite(runner, host, port, reuse_address=reuse, backlog=backlog, ssl_context=context)
    await site.start()
    return int(runner.addresses[0][1])
