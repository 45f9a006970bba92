"""Metrics endpoint for Prometheus while a batch runs. It serves figures only, and requires no token."""

import asyncio
from collections.abc import Callable

from aiohttp import web

from regrow.core.errors import UsageError
from regrow.core.hosts import address_of
from regrow.core.metrics_text import CONTENT_TYPE

PATH = "/metrics"


async def serve_metrics(place: tuple[str, int], text: Callable[[], str], say: Callable[[str], None]) -> None:
    """Serve until cancelled. Raises `UsageError` if the address cannot be bound.

    Args:
        place: host and port.
        text: makes the answer to a scrape.
        say: prints a sentence with the address.
    """

    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=text().encode(), headers={"Content-Type": CONTENT_TYPE})

    app = web.Application()
    app.router.add_get(PATH, answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, *place).start()
        except OSError as error:
            raise UsageError(
                f"--metrics {address_of(*place)}: {error.strerror or error}", hint="choose another port"
            ) from error
        say(f"metrics are at http://{address_of(place[0], int(runner.addresses[0][1]))}{PATH}")
        await asyncio.Event().wait()
    finally:
        await asyncio.shield(runner.cleanup())
