"""A launcher without the coordinator: it follows the present one, votes after its loss, and may be elected."""

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable
from types import TracebackType

import aiohttp
import msgspec
from aiohttp import web

from regrow.core import http, tls
from regrow.core.clock import Clock, MonotonicClock
from regrow.core.hosts import LOOPBACK, address_of
from regrow.core.ids import Instant, NodeId, Seconds
from regrow.core.messages.elections import (
    CoordinatorPresent,
    Handover,
    LauncherPresent,
    Leader,
    VoteAnswered,
    VoteAsked,
    Voter,
)
from regrow.core.process.tasks import TaskScope, supervised
from regrow.core.wire import UNREADABLE
from regrow.membership.server.http_replies import refusal, reply, unknown
from regrow.membership.server.witness_folder import WitnessFolder
from regrow.membership.succession.election import Election
from regrow.membership.succession.voters import VOTE_LEASE
from regrow.membership.succession.witness import is_witness

_AGAIN_S: Seconds = 0.1
_ASK_S: Seconds = 1.0
_LONGEST_PAUSE_S: Seconds = 0.5
_ELECTION_S: Seconds = 30.0
"""Time without an election after which the job's coordinator is lost for good."""
_UNASKED_S: Seconds = 5.0
"""Time for which a launcher that knows too few voters waits for a vote request, if the coordinator's process has ended.

One that is only silent may answer again: its link may be cut.
"""


class FollowingLauncher:
    """Follows the coordinator and takes part in elections. Open it with `async with`, then call `follow`.

    Args:
        node: this launcher's node.
        token: the job's secret.
        bind: address to listen on.
        advertise: host under which the other nodes reach it.
        say: prints a line for the user.
        become_leader: hosts the coordinator in this launcher after its election; returns the coordinator's URL.
        clock: for leases.
    """

    def __init__(
        self,
        node: NodeId,
        *,
        token: str,
        bind: str,
        advertise: str,
        say: Callable[[str], None],
        become_leader: "Callable[[Elected], Awaitable[str]]",
        clock: Clock | None = None,
    ) -> None:
        self.leader: Leader | None = None
        """The present coordinator, as far as this launcher knows."""
        self.ended = False
        """True once the coordinator has reported the job's end."""
        self._node, self._bind, self._advertise = node, bind, advertise
        self._headers = {"Authorization": f"Bearer {token}"}
        self._secret = self._headers["Authorization"].encode()
        self._say, self._become_leader = say, become_leader
        self._clock = clock or MonotonicClock()
        self._election = Election(Voter("", node, ""))
        self._lease = VOTE_LEASE
        self._ahead: Seconds = 0.0
        self._beat: Instant | None = None
        self._lost_at: Instant = 0.0
        self._over = False
        self._refused = False
        """True if nothing listens at the present coordinator's address any more."""
        self._looking = False
        """True while this launcher looks for another coordinator, whose election may be under way."""
        self._witness: WitnessFolder | None = None
        self._news = asyncio.Event()
        self._runner: web.AppRunner | None = None
        self._session: aiohttp.ClientSession | None = None
        self._task: asyncio.Task[None] | None = None
        self.port = 0

    async def __aenter__(self) -> "FollowingLauncher":
        """Start to listen."""
        app = web.Application(middlewares=[self._guard])
        app.add_routes([web.post("/vote", self._serve_vote), web.get("/leader", self._serve_leader)])
        app.add_routes([web.post("/needed", self._serve_needed)])
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=0.5)
        await self._runner.setup()
        self.port = await http.listen(self._runner, self._bind, 0, endpoint="launcher", strict=True)
        me = Voter(f"{self._node}@{secrets.token_hex(8)}", self._node, address_of(self._advertise, self.port))
        self._election = Election(me)
        self._session = http.session(headers=self._headers)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop following and listening."""
        self._end()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        if self._witness is not None:
            self._witness.close()
        if self._session is not None:
            await self._session.close()
        if self._runner is not None:
            await self._runner.cleanup()

    @property
    def url(self) -> str:
        """URL at which this node's agent reaches this launcher."""
        host = LOOPBACK if self._bind in ("0.0.0.0", "::") else self._bind
        return tls.url(address_of(host, self.port))

    def follow(self, leader: Leader) -> None:
        """Start to follow this leader as the present coordinator."""
        self.leader = leader
        self._election.follow(self._lease, self._clock.now())
        self._task = supervised(self._run(), "following the coordinator", self._cannot_follow)

    async def next(self, term: int) -> Leader | None:
        """Wait for a coordinator of a later term; None: the job is over, or has lost its coordinator for good."""
        while not self._over and (self.leader is None or self.leader.term <= term):
            await self._news.wait()
        return self.leader if self.leader is not None and self.leader.term > term else None

    def _notify(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    def _end(self) -> None:
        self._over = True
        self._notify()

    # --- following ---------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            while self.leader is not None and not self._over:
                if not await self._attend(self.leader):
                    return
                leader = await self._find_next(self.leader)
                if leader is None:
                    return
                self.leader, self._beat, self._refused = leader, None, False
                self._election.follow(self._lease, self._clock.now())
                self._notify()
        finally:
            self._end()

    def _cannot_follow(self, _: str, error: BaseException) -> None:
        """Report the error that ended the following."""
        self._say(f"{self._node} cannot follow the job's coordinator: {type(error).__name__}: {error}")

    async def _attend(self, leader: Leader) -> bool:
        """Exchange heartbeats with the coordinator; True once another one must be found, False if the job has ended."""
        election, failed_at, pause = self._election, None, _AGAIN_S
        while True:
            unreachable = False
            try:
                answer = await self._present(leader)
            except aiohttp.ClientConnectorError as error:
                if isinstance(error.os_error, ConnectionRefusedError):
                    # Nothing listens there any more: its process has ended.
                    election.released(now := self._clock.now())
                    self._lost_at, self._refused = failed_at or now, True
                    return True
                unreachable = not await http.is_only_silent(leader.address, _ASK_S)
            except aiohttp.ConnectionTimeoutError:
                unreachable = not await http.is_only_silent(leader.address, _ASK_S)
            except (aiohttp.ClientError, TimeoutError, *UNREADABLE):
                failed_at = failed_at or self._clock.now()
            else:
                if answer.ended:
                    self.ended = True
                    return False
                now = self._clock.now()
                if not election.received(answer.term, answer.handover, answer.lease, now):
                    return True
                self._beat, self._lease = answer.beat, answer.lease
                self._ahead = now - answer.beat
                self._lost_at, failed_at, pause = now, None, _AGAIN_S
                continue
            # A paused process does not answer either, but its machine accepts connections; and between faults training
            # needs no coordinator.
            if self._clock.now() >= election.bound_until and (
                election.misses(leader.term) or unreachable or await self._ask_around(leader.term) is not None
            ):
                return True
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    async def _present(self, leader: Leader) -> CoordinatorPresent:
        if self._session is None:
            raise RuntimeError("the deputy is not open")
        handover = self._election.handover
        term, number = (0, 0) if handover is None else handover.version
        body = msgspec.msgpack.encode(LauncherPresent(self._election.me, term, number, self._beat))
        timeout = aiohttp.ClientTimeout(total=self._lease / 2, sock_connect=_ASK_S)
        async with self._session.post(f"{leader.address}/launcher", data=body, timeout=timeout) as response:
            return msgspec.msgpack.decode(await response.read(), type=CoordinatorPresent)

    # --- electing ----------------------------------------------------------------------------------------------

    async def _find_next(self, lost: Leader) -> Leader | None:
        """Find the next coordinator: an elected launcher, this one or another, or the lost one if its link is back.

        None: no election succeeds in time.
        """
        self._looking = True
        try:
            async with TaskScope() as scope:
                return await self._elect(lost, scope.start(self._await_return(lost)))
        finally:
            self._looking = False

    async def _await_return(self, lost: Leader) -> bool:
        """Wait until the lost coordinator answers; True if this launcher may still follow it."""
        while True:
            await asyncio.sleep(_LONGEST_PAUSE_S)
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, *UNREADABLE):
                answer = await self._present(lost)
                now = self._clock.now()
                return self._election.received(answer.term, answer.handover, answer.lease, now) or answer.ended

    async def _elect(self, lost: Leader, returns: asyncio.Task[bool]) -> Leader | None:
        """Hold elections as `_find_next` describes. `returns`: True once the lost coordinator answers again."""
        election, since = self._election, self._clock.now()
        while self._clock.now() < since + self._patience and not self._over:
            if (found := await self._ask_around(lost.term)) is not None:
                return found
            if returns.done() and returns.result():
                return lost
            asked = election.stand(self._clock.now())
            if asked is not None and election.wins(await self._collect(asked)):
                asked = election.campaign(asked, self._clock.now())
                if asked is None or election.handover is None:
                    continue
                if election.wins(await self._collect(asked)) and election.term == asked.term:
                    election.become_leader()
                    elected = Elected(election.me, asked.term, election.handover, self._ahead, self._lost_at)
                    return Leader(asked.term, await self._become_leader(elected))
            await asyncio.sleep(_AGAIN_S)
        return None

    @property
    def _patience(self) -> Seconds:
        """Longest time from now in which another coordinator may still be elected."""
        unasked = self._refused and not self._election.possible and not self._election.candidates
        return _UNASKED_S if unasked else _ELECTION_S

    def _others(self) -> list[Voter]:
        handover = self._election.handover
        me = self._election.me.name
        return [] if handover is None else [voter for voter in handover.voters if voter.name != me]

    async def _collect(self, asked: VoteAsked) -> int:
        """Number of votes for this launcher, with its own vote."""
        return 1 + sum(await asyncio.gather(*(self._ask_vote(voter, asked) for voter in self._others())))

    async def _ask_vote(self, voter: Voter, asked: VoteAsked) -> bool:
        if is_witness(voter):
            if self._witness is None or self._witness.voter != voter:
                self._witness = WitnessFolder(voter, self._clock)
            return await self._witness.votes(asked)
        answer = await self._ask("POST", voter.address, "/vote", msgspec.msgpack.encode(asked.to(voter.name)))
        return answer is not None and self._election.answered(msgspec.msgpack.decode(answer, type=VoteAnswered))

    async def _ask_around(self, term: int) -> Leader | None:
        """Ask the other voters for the coordinator of the latest term; None if no term is later than `term`."""
        voters = {voter.address for voter in self._others() if not is_witness(voter)}
        asked = [self._ask("GET", address, "/leader") for address in voters | {*self._election.candidates.values()}]
        answers = [answer for answer in await asyncio.gather(*asked) if answer is not None]
        leaders = [msgspec.json.decode(answer, type=Leader) for answer in answers]
        return max((leader for leader in leaders if leader.term > term), key=lambda leader: leader.term, default=None)

    async def _ask(self, method: str, address: str, path: str, body: bytes | None = None) -> bytes | None:
        if self._session is None:
            return None
        timeout = aiohttp.ClientTimeout(total=_ASK_S)
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with self._session.request(
                method, tls.url(f"{address}{path}"), data=body, timeout=timeout
            ) as response:
                answer = await response.read()
                return answer if response.status == 200 else None
        return None

    # --- answering ---------------------------------------------------------------------------------------------

    async def _serve_vote(self, request: web.Request) -> web.Response:
        try:
            asked = msgspec.msgpack.decode(await request.read(), type=VoteAsked)
        except UNREADABLE as error:
            return refusal(400, f"POST /vote is not understood: {error}", "do all nodes run the same regrow?")
        granted = not self._over and self._election.vote(asked, self._clock.now())
        return web.Response(body=msgspec.msgpack.encode(VoteAnswered(granted, self._election.term)))

    async def _serve_leader(self, request: web.Request) -> web.Response:
        """Serve the present coordinator. `?after=TERM&when=later`: wait for a later one; `lost`: TERM's is lost."""
        if self.leader is None:
            return refusal(503, "no coordinator is known yet", "")
        when, after = request.query.get("when", "now"), int(request.query.get("after", "0"))
        if when == "now":
            return reply(msgspec.structs.replace(self.leader, voted=self._election.term))
        if when == "lost" and await self._returns(after, request):
            return refusal(409, "that coordinator is there, and has given this agent up", "")
        leader = await self.next(after)
        return refusal(410, "the job has no coordinator any more", "") if leader is None else reply(leader)

    async def _serve_needed(self, request: web.Request) -> web.Response:
        """Take an agent's report that it needs the coordinator of the term in `?after=TERM` and gets no answer."""
        self._election.miss(int(request.query.get("after", "0")))
        return web.json_response({})

    async def _returns(self, term: int, asked: web.Request) -> bool:
        """True if the coordinator of this term answers, now or once its link is back, before a later term begins.

        A coordinator that was only paused may have been voted out meanwhile, so its answer does not count while this
        launcher looks for another. Also False if the requester disconnects.
        """
        while not self._over and self.leader is not None and self.leader.term <= term and asked.transport is not None:
            if await self._answers(self.leader) and not self._looking and self.leader.term <= term:
                return True
            self._election.miss(term)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), _LONGEST_PAUSE_S)
        return False

    async def _answers(self, leader: Leader) -> bool:
        """True if this coordinator answers now."""
        if self._session is None:
            return False
        try:
            timeout = aiohttp.ClientTimeout(total=2 * _ASK_S)
            async with self._session.get(f"{leader.address}/time", timeout=timeout) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        stranger = unknown(request, self._secret, endpoint="launcher")
        if stranger is not None:
            return stranger
        http.admit(request)
        return await handler(request)


class Elected(msgspec.Struct, frozen=True):
    """Result of an election that makes this launcher the host of the coordinator.

    `ahead`: this machine's clock minus the former coordinator's, in seconds.
    `lost_at`: time on this clock when the former coordinator was last known to run.
    """

    me: Voter
    term: int
    handover: Handover
    ahead: Seconds
    lost_at: Instant
