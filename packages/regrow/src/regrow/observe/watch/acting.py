"""Actions of the live page on a job, for holders of the job's token; without the token the page is read-only.

The requests are the same as those of `regrow drain`, `scale` and `kill`; the coordinator's own handlers answer them.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from urllib.parse import urlsplit

import msgspec
from aiohttp import web

from regrow.core.net import same_secret
from regrow.membership.server.http_replies import refusal, reply

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_HINT = "regrow token JOB prints it on the job's machine"


class ActionsOffered(msgspec.Struct, frozen=True):
    """Actions that a holder of the token can take."""

    actions: list[str]


class PageActions:
    """`POST /act/NAME` for each action, and `POST /act`, which lists the actions.

    A browser sends an `Authorization` header only if a page of this origin has set it, so pages of other origins cannot
    act; `Origin` is checked all the same. The token is not part of any URL, and requests are not logged.

    Args:
        token: the job's token.
        handlers: the coordinator's handlers, by the names of the actions.
    """

    def __init__(self, token: str, handlers: Mapping[str, Handler]) -> None:
        self._secret = f"Bearer {token}".encode()
        self._handlers = handlers

    def routes(self) -> Sequence[web.RouteDef]:
        """Routes of the actions."""
        acting = [web.post(f"/act/{name}", self._guarded(handler)) for name, handler in self._handlers.items()]
        return [web.post("/act", self._guarded(self._serve_offer)), *acting]

    def _guarded(self, handler: Handler) -> Handler:
        async def answer(request: web.Request) -> web.StreamResponse:
            refused = self._refused(request)
            return await handler(request) if refused is None else refused

        return answer

    def _refused(self, request: web.Request) -> web.Response | None:
        origin = request.headers.get("Origin")
        if origin is not None and urlsplit(origin).netloc != request.host:
            return refusal(403, f"a page of {origin} cannot act here", "")
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if not same_secret(given, self._secret):
            return refusal(401, "the token is not this job's", _HINT)
        if request.content_type != "application/json":
            return refusal(415, "the request must be JSON", "")
        return None

    async def _serve_offer(self, request: web.Request) -> web.Response:
        return reply(ActionsOffered(list(self._handlers)))
