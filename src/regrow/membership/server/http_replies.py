"""The coordinator's answers over HTTP."""

import os

import msgspec
from aiohttp import web


def reply(message: msgspec.Struct) -> web.Response:
    """What was asked for."""
    return web.Response(body=msgspec.json.encode(message), content_type="application/json")


def refusal(status: int, error: str, hint: str) -> web.Response:
    """Why not, and what to do instead."""
    return web.json_response({"error": error, "hint": hint}, status=status)


def words_of(error: OSError) -> str:
    """The system's own words; asyncio wraps them in a sentence of its own."""
    return os.strerror(error.errno) if error.errno is not None and error.errno > 0 else str(error)
