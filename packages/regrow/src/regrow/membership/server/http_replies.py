"""The coordinator's answers over HTTP."""

import os

import msgspec
from aiohttp import web

from regrow.core.net import same_secret
from regrow.core.strangers import refused


def reply(message: msgspec.Struct) -> web.Response:
    """Response with a message as JSON."""
    return web.Response(body=msgspec.json.encode(message), content_type="application/json")


def refusal(status: int, error: str, hint: str) -> web.Response:
    """Response with the reason of a refusal and its cure."""
    return web.json_response({"error": error, "hint": hint}, status=status)


def unknown(request: web.Request, secret: bytes, *, endpoint: str) -> web.Response | None:
    """Refusal for a caller without the job's token; None if the token is right.

    Args:
        request: the caller's request.
        secret: the expected value of the `Authorization` header.
        endpoint: name under which the refusal is counted.
    """
    given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
    if same_secret(given, secret):
        return None
    refused.add(endpoint, f"a request for {request.path} from {request.remote} without the job's token")
    return refusal(401, "the token is not this job's", "use the job's own, or ask its owner")


def words_of(error: OSError) -> str:
    """The system's error text, without the sentence that asyncio adds."""
    return os.strerror(error.errno) if error.errno is not None and error.errno > 0 else str(error)
