"""HTTP interface of the coordinator, for people and for the launchers of other nodes."""

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

import msgspec
from aiohttp import web

from regrow.core.errors import NoPlaceYet, UsageError
from regrow.core.ids import Rank, Seconds
from regrow.core.job import JobSpec
from regrow.core.messages import facts
from regrow.core.messages.unions import Fact
from regrow.core.messages.vocabulary import FaultSpec
from regrow.core.wire import UNREADABLE
from regrow.membership.admission import LOCKED, JoinOffer, JoinRequest
from regrow.membership.orders import AnswerScale, Deposed, EndJob
from regrow.membership.server.http_replies import refusal, reply
from regrow.membership.server.requests import DrainRequest, MoveRequest, ScaleRequest

_LONGEST_REASON = 200
_LONGEST_STOP: Seconds = 3600.0
Asked = TypeVar("Asked", bound=msgspec.Struct)


class WallClock(msgspec.Struct, frozen=True):
    """Answer to `GET /time`: seconds since the epoch."""

    time: Seconds


class ApiHost(Protocol):
    """The part of a coordinator that the HTTP interface uses."""

    @property
    def over(self) -> bool:
        """True if the job has ended."""
        ...

    def submit(self, fact: Fact) -> AnswerScale | None:
        """Give the machine a fact; returns its answer, if it has one."""
        ...

    async def wait_ended(self) -> EndJob:
        """Wait for the job's end and return it."""
        ...

    def make_offer(self, request: JoinRequest) -> JoinOffer:
        """The offer to a node that asks to join. Raises `UsageError` if the node may not join."""
        ...


class HttpApi:
    """Answers HTTP requests.

    Args:
        host: the coordinator.
        spec: settings of the job.
        world: returns the number of ranks.
        view: returns the view of the job for people.
    """

    def __init__(
        self, host: ApiHost, spec: JobSpec, world: Callable[[], int], view: Callable[[], msgspec.Struct]
    ) -> None:
        self._host = host
        self._spec = spec
        self._world = world
        self._view = view

    def routes(self) -> Sequence[web.RouteDef]:
        """The routes to serve."""
        return [
            web.get("/job", self._serve_job),
            web.get("/end", self._serve_end),
            web.get("/status", self._serve_status),
            web.get("/time", self._serve_time),
            web.post("/join", self._serve_join),
            web.post("/stop", self._serve_stop),
            *(web.post(f"/{name}", handler) for name, handler in self.actions().items()),
        ]

    def actions(self) -> dict[str, Callable[[web.Request], Awaitable[web.Response]]]:
        """Operators' actions on a running job. A server that offers them must check the job's token first."""
        drain, move = self._serve_drain, self._serve_move
        return {"drain": drain, "move": move, "scale": self._serve_scale, "kill": self._serve_kill}

    async def _serve_job(self, request: web.Request) -> web.Response:
        return reply(self._spec)

    async def _serve_status(self, request: web.Request) -> web.Response:
        return reply(self._view())

    async def _serve_time(self, request: web.Request) -> web.Response:
        """This machine's wall clock, with which nodes compare theirs."""
        return reply(WallClock(time.time()))

    async def _serve_end(self, request: web.Request) -> web.Response:
        """Answer when the job has ended; the launchers of other nodes wait for this."""
        end = await self._host.wait_ended()
        if isinstance(end, Deposed):
            return refusal(409, end.diagnosis, "ask that one")
        return reply(end)

    async def _serve_join(self, request: web.Request) -> web.Response:
        asked = await _read(request, JoinRequest)
        if isinstance(asked, web.Response):
            return asked
        if self._host.over:
            return _ending()
        try:
            return reply(self._host.make_offer(asked))
        except UsageError as error:
            return refusal(LOCKED if isinstance(error, NoPlaceYet) else 409, error.cause, error.hint)

    async def _serve_kill(self, request: web.Request) -> web.Response:
        fault = await _read(request, FaultSpec)
        if isinstance(fault, web.Response):
            return fault
        if not 0 <= fault.rank < self._world():
            return self._no_such_rank(fault.rank)
        if self._host.over:
            return _ending()
        answer = self._host.submit(facts.FaultRequested(fault))
        if answer is not None and not answer.accepted:
            return refusal(409, answer.reason, "")
        return web.json_response({}, status=202)

    def _no_such_rank(self, rank: Rank) -> web.Response:
        world = self._world()
        has = f"this job has ranks 0 to {world - 1}" if world else "this job has no ranks yet"
        return refusal(400, f"there is no rank {rank}", has)

    async def _serve_stop(self, request: web.Request) -> web.Response:
        reason = (await request.text())[:_LONGEST_REASON].strip()
        try:
            patience = min(max(0.0, float(request.query.get("patience", "0"))), _LONGEST_STOP)
        except ValueError:
            return refusal(400, "patience is no number of seconds", "give it as ?patience=30")
        if self._host.over:
            return _ending()
        self._host.submit(facts.StopRequested(reason or "an operator asked for it", patience))
        return web.json_response({}, status=202)

    async def _serve_scale(self, request: web.Request) -> web.Response:
        asked = await _read(request, ScaleRequest)
        if isinstance(asked, web.Response):
            return asked
        if (asked.replicas is None) == (asked.ranks is None):
            return refusal(400, "either replicas or ranks must be given", "")
        reason = asked.reason[:_LONGEST_REASON].strip() or "an operator asked for it"
        answer = self._host.submit(facts.ScaleRequested(asked.replicas or 0, reason, asked.stay, asked.ranks))
        return _ending() if answer is None else reply(answer)

    async def _serve_drain(self, request: web.Request) -> web.Response:
        asked = await _read(request, DrainRequest)
        if isinstance(asked, web.Response):
            return asked
        if not 0 <= asked.grace < float("inf"):
            return refusal(400, f"a grace of {asked.grace} s cannot be", "")
        reason = asked.reason[:_LONGEST_REASON].strip() or "an operator asked for it"
        answer = self._host.submit(facts.DrainRequested(asked.node, asked.grace, reason, asked.certain))
        return _ending() if answer is None else reply(answer)

    async def _serve_move(self, request: web.Request) -> web.Response:
        asked = await _read(request, MoveRequest)
        if isinstance(asked, web.Response):
            return asked
        if (asked.rank is None) == (not asked.node):
            return refusal(400, "either a node or a rank must be given", "")
        if asked.rank is not None and not 0 <= asked.rank < (self._world() or asked.rank + 1):
            return self._no_such_rank(asked.rank)
        reason = asked.reason[:_LONGEST_REASON].strip() or "an operator asked for it"
        answer = self._host.submit(facts.MoveRequested(asked.node, asked.rank, asked.to, reason))
        return _ending() if answer is None else reply(answer)


async def _read(request: web.Request, kind: type[Asked]) -> Asked | web.Response:
    """Decode a request; returns a refusal if it cannot be decoded."""
    try:
        return msgspec.json.decode(await request.read(), type=kind)
    except UNREADABLE as error:
        return refusal(400, f"{request.method} {request.path} is not understood: {error}", "")


def _ending() -> web.Response:
    return refusal(409, "the job is ending", "")
