"""A launcher that follows coordinators: which of them it leaves, and for whose sake."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import aiohttp
import msgspec
import pytest
from aiohttp import web
from tests.unit.agent.test_agent_environment import config

from regrow.agent.succession import NextCoordinator
from regrow.core.ids import NodeId, WorkerId
from regrow.core.messages import facts
from regrow.core.messages.elections import (
    CoordinatorPresent,
    Handover,
    LauncherPresent,
    Leader,
    VoteAnswered,
    VoteAsked,
    Voter,
)
from regrow.launch.succession.following import Elected, FollowingLauncher
from regrow.membership.succession.voters import VOTE_LEASE

LONG_S = 60.0
"""Against a hang."""


class ManualClock:
    def __init__(self) -> None:
        self.time = 1000.0

    def now(self) -> float:
        return self.time


class Peers:
    """The other nodes of a job of three, in one server: coordinators of terms 1 and 2, and the launchers that vote.

    A coordinator answers until it is silenced; then it hangs up. Nobody votes.
    """

    def __init__(self) -> None:
        self.silent: set[int] = set()
        self.resumed: set[int] = set()
        """Silent ones that tell the time again, as after a pause."""
        self.leader = 1
        self.seen = asyncio.Condition()
        self.presents = {1: 0, 2: 0}
        self.votes_asked, self.times_asked = 0, 0
        self.address = ""
        self.voters: tuple[int, ...] = (0, 2)
        """In the handover of term 2, beside the launcher itself."""
        self.follower = ""
        """Its name."""

    def leader_of(self, term: int) -> Leader:
        return Leader(term, f"http://{self.address}/{term}")

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        app = web.Application()
        app.add_routes([web.post("/{term}/launcher", self._beat), web.post("/vote", self._vote)])
        app.add_routes([web.get("/leader", self._tell), web.get("/{term}/time", self._time)])
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self.address = f"127.0.0.1:{runner.addresses[0][1]}"
            yield
        finally:
            await runner.cleanup()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(LONG_S), self.seen:
            await self.seen.wait_for(condition)

    async def stays(self, term: int) -> bool:
        """Wait until the launcher has tried this coordinator twice more, or looks for another; True if it stays."""
        before, asked = self.presents[term], self.votes_asked
        await self.until(lambda: self.presents[term] >= before + 2 or self.votes_asked > asked)
        return self.votes_asked == asked

    async def silence(self, term: int) -> None:
        """Let nothing that this coordinator has answered be under way any more."""
        self.silent.add(term)
        before = self.presents[term]
        await self.until(lambda: self.presents[term] >= before + 2)

    async def _beat(self, request: web.Request) -> web.Response:
        term = int(request.match_info["term"])
        present = msgspec.msgpack.decode(await request.read(), type=LauncherPresent)
        async with self.seen:
            self.presents[term] += 1
            self.seen.notify_all()
        if term in self.silent:
            if request.transport is not None:
                request.transport.close()
            return web.Response()
        await asyncio.sleep(0)
        self.follower = present.voter.name
        others = (0, 2) if term == 1 else self.voters
        voters = [present.voter, *(Voter(f"node{n}@x", NodeId(f"node{n}"), self.address) for n in others)]
        answer = CoordinatorPresent(term, 0.0, VOTE_LEASE, Handover(term, 1, voters, NodeId("node0"), b"memory"))
        return web.Response(body=msgspec.msgpack.encode(answer))

    async def _time(self, request: web.Request) -> web.Response:
        term = int(request.match_info["term"])
        async with self.seen:
            self.times_asked += 1
            self.seen.notify_all()
        return web.Response(status=503 if term in self.silent - self.resumed else 200)

    async def _vote(self, _: web.Request) -> web.Response:
        async with self.seen:
            self.votes_asked += 1
            self.seen.notify_all()
        return web.Response(body=msgspec.msgpack.encode(VoteAnswered(False, 1)))

    async def _tell(self, _: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(self.leader_of(self.leader)))


class Follower:
    """A deputy that follows the second coordinator, after the first was lost."""

    def __init__(
        self, peers: Peers, follower: FollowingLauncher, clock: ManualClock, session: aiohttp.ClientSession
    ) -> None:
        self.peers, self.follower, self.clock, self._session = peers, follower, clock, session

    async def ask(self, path: str, method: str = "POST") -> int:
        async with self._session.request(method, f"{self.follower.url}{path}") as response:
            return response.status

    async def votes(self, asked: VoteAsked) -> bool:
        body = msgspec.msgpack.encode(asked)
        async with self._session.post(f"{self.follower.url}/vote", data=body) as response:
            return msgspec.msgpack.decode(await response.read(), type=VoteAnswered).granted


@asynccontextmanager
async def following(*, answered: bool, voters: tuple[int, ...] = (0, 2)) -> AsyncIterator[Follower]:
    """`answered`: whether the second coordinator has answered before it fell silent; `voters`: whom it has named."""

    async def elected(_: Elected) -> str:
        raise AssertionError("nobody has voted")

    peers, clock = Peers(), ManualClock()
    peers.voters = voters
    headers = {"Authorization": "Bearer secret"}
    async with (
        peers.serving(),
        aiohttp.ClientSession(headers=headers) as session,
        FollowingLauncher(
            NodeId("node1"),
            token="secret",
            bind="127.0.0.1",
            advertise="127.0.0.1",
            say=lambda _: None,
            become_leader=elected,
            clock=clock,
        ) as follower,
    ):
        follower.follow(peers.leader_of(1))
        await peers.until(lambda: peers.presents[1] > 1)  # it has the handover
        await peers.silence(1)
        peers.silent |= set() if answered else {2}
        peers.leader = 2
        clock.time += VOTE_LEASE
        async with asyncio.timeout(LONG_S):
            assert await follower.next(1) == peers.leader_of(2)
        if answered:
            await peers.until(lambda: peers.presents[2] > 1)
            await peers.silence(2)
            clock.time += VOTE_LEASE
        yield Follower(peers, follower, clock, session)


async def test_a_launcher_that_knows_of_too_few_voters_finds_who_was_elected_by_that_it_was_asked_for_its_vote() -> (
    None
):
    """The launcher has voted for one that is none of the voters it knows."""
    async with following(answered=True, voters=()) as it:
        it.peers.leader = 3
        asked = VoteAsked(3, "node5@x", (2, 9), address=it.peers.address, voter=it.peers.follower)
        assert await it.votes(asked)
        async with asyncio.timeout(LONG_S):
            assert await it.follower.next(2) == it.peers.leader_of(3)


@pytest.mark.parametrize("miss", ["/needed?after=1", "/needed"])
async def test_an_agent_that_misses_the_last_coordinator_says_nothing_against_the_next_one(miss: str) -> None:
    async with following(answered=True) as it:
        assert await it.ask(miss) == 200
        assert await it.peers.stays(2)
        assert await it.ask("/needed?after=2") == 200
        assert not await it.peers.stays(2)


async def test_an_agent_that_looks_for_the_next_coordinator_finds_it_and_says_nothing_against_it() -> None:
    async with following(answered=True) as it:
        assert await it.ask("/leader?after=1&when=lost", "GET") == 200
        assert await it.peers.stays(2)


async def test_an_agent_that_was_given_up_while_its_link_was_cut_is_told_as_soon_as_it_is_back() -> None:
    """Asked then, its launcher does not know whether the coordinator is lost, and soon nobody elects another."""
    async with following(answered=True) as it:
        asking = asyncio.create_task(it.ask("/leader?after=2&when=lost", "GET"))
        await it.peers.until(lambda: it.peers.times_asked > 0)
        assert not await it.peers.stays(2), "it is missed, and another is looked for"
        assert not asking.done()
        it.peers.silent.clear()
        async with asyncio.timeout(LONG_S):
            assert await asking == 409


async def test_a_coordinator_that_goes_on_after_a_pause_while_another_is_elected_costs_no_agent() -> None:
    async with following(answered=True) as it:
        asking = asyncio.create_task(it.ask("/leader?after=2&when=lost", "GET"))
        assert not await it.peers.stays(2), "another is looked for"
        it.peers.resumed.add(2)
        before = it.peers.presents[2]
        await it.peers.until(lambda: it.peers.presents[2] > before + 4)
        assert not asking.done()
        it.peers.leader = 3
        async with asyncio.timeout(LONG_S):
            assert await asking == 200


async def test_a_launcher_whose_link_is_back_before_another_is_elected_follows_the_coordinator_again() -> None:
    async with following(answered=True) as it:
        assert await it.ask("/needed?after=2") == 200
        assert not await it.peers.stays(2), "it stands for election"
        it.peers.silent.clear()
        before = it.peers.presents[2]
        await it.peers.until(lambda: it.peers.presents[2] > before + 10)
        asked = it.peers.votes_asked
        await it.peers.until(lambda: it.peers.presents[2] > before + 30)
        assert it.peers.votes_asked == asked
        assert it.follower.leader == it.peers.leader_of(2)


async def test_a_coordinator_that_is_only_silent_is_waited_for_though_too_few_voters_are_known() -> None:
    async with following(answered=True, voters=()) as it:
        assert await it.ask("/needed?after=2") == 200
        later = asyncio.create_task(it.follower.next(2))
        for seconds in (0.0, 10.0, 10.0):
            it.clock.time += seconds
            before = it.peers.presents[2]
            await it.peers.until(lambda before=before: it.peers.presents[2] > before + 3)  # type: ignore[misc]
            assert not later.done(), "its link may be cut"
        it.peers.silent.clear()
        before = it.peers.presents[2]
        await it.peers.until(lambda: it.peers.presents[2] > before + 10)
        assert it.follower.leader == it.peers.leader_of(2) and not later.done()
        later.cancel()


async def test_a_new_coordinator_has_its_lease_to_answer_at_all_though_it_is_missed() -> None:
    async with following(answered=False) as it:
        await it.ask("/needed?after=2")
        assert await it.peers.stays(2)
        it.clock.time += VOTE_LEASE
        assert not await it.peers.stays(2)


async def test_an_agent_says_which_coordinator_it_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regrow.agent.succession._NEED_AFTER_S", 0.2)
    missed: asyncio.Queue[str] = asyncio.Queue()

    async def needed(request: web.Request) -> web.Response:
        missed.put_nowait(request.query["after"])
        return web.json_response({})

    async def leader(_: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(Leader(4, "http://host1:1")))

    app = web.Application()
    app.add_routes([web.post("/needed", needed), web.get("/leader", leader)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with aiohttp.ClientSession() as session, asyncio.timeout(LONG_S):
            agent = NextCoordinator(config(launcher=url, term=3))
            telling = asyncio.create_task(agent.report_need(session))
            agent.sent(facts.WorkerExited(WorkerId("w"), -9, 0.0))
            assert await missed.get() == "3"
            await agent.find(session)
            while await missed.get() == "3":
                pass
            telling.cancel()
    finally:
        await runner.cleanup()
