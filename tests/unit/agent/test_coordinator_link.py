"""The connection between agents and their coordinator, of which either may be paused."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
from aiohttp import web
from tests.unit.agent.test_agent_environment import config
from tests.unit.membership.test_coordinator import ScriptedMachine, agent, serving

from regrow.agent.coordinator_link import CoordinatorLink
from regrow.core.ids import NodeId
from regrow.core.messages import facts
from regrow.core.messages.elections import Leader
from regrow.core.messages.orders import StopNode
from regrow.core.messages.unions import AgentOrder
from regrow.membership.server.http_replies import reply

PATIENCE = 30.0
STOP = StopNode(NodeId("near"), "done", 0.0)


class PausedCoordinator:
    """Takes connections and answers nothing on them, no ping either, until it goes on."""

    def __init__(self) -> None:
        self.port = 0
        self._goes_on = asyncio.Event()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        app = web.Application()
        app.add_routes([web.get("/agent", self._serve)])
        runner = web.AppRunner(app, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self.port = int(runner.addresses[0][1])
            yield
        finally:
            self._goes_on.set()
            await runner.cleanup()

    def go_on(self) -> None:
        self._goes_on.set()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse(autoping=False)
        await socket.prepare(request)
        await self._goes_on.wait()
        if request.query["node"] == STOP.node:
            await socket.send_bytes(msgspec.msgpack.encode(STOP))
        if request.query["node"] == "many":
            await socket.send_bytes(msgspec.msgpack.encode([STOP, STOP]))
        return socket

    def link(self, node: str, *, near: bool) -> CoordinatorLink:
        where = f"http://127.0.0.1:{self.port}"
        return CoordinatorLink(config(node=NodeId(node), coordinator=where, near=near, patience=0.3), fails)


def fails(doing: str, error: BaseException) -> None:
    raise AssertionError(f"{doing}: {error!r}")


async def orders(link: CoordinatorLink) -> list[AgentOrder]:
    """All orders until the connection ends."""
    return [order async for order in link.orders()]


async def test_a_silent_coordinator_is_borne_by_its_own_child_and_by_others_for_their_patience() -> None:
    coordinator = PausedCoordinator()
    async with coordinator.serving(), coordinator.link("near", near=True) as near:
        waits = asyncio.create_task(orders(near))
        for node in ("far0", "far1", "far2"):  # each begins after `near` and gives up by itself, one after another
            async with coordinator.link(node, near=False) as far:
                assert await asyncio.wait_for(orders(far), PATIENCE) == []
        assert not waits.done(), "the child of a coordinator that was paused gave it up"
        coordinator.go_on()
        assert await asyncio.wait_for(waits, PATIENCE) == [STOP]


async def test_orders_that_come_together_are_given_one_by_one() -> None:
    coordinator = PausedCoordinator()
    coordinator.go_on()
    async with coordinator.serving(), coordinator.link("many", near=True) as link:
        assert await asyncio.wait_for(orders(link), PATIENCE) == [STOP, STOP]


async def test_an_agent_of_the_coordinators_own_is_not_lost_by_its_silence_as_others_are() -> None:
    machine = ScriptedMachine()
    async with (
        serving(machine, lease=0.3, near=[NodeId("node0")]) as (coordinator, _),
        agent(coordinator, "node0"),  # listens to nothing, as one that is stopped: no ping is answered
    ):
        assert isinstance(await machine.hears(), facts.NodeJoined)
        for node in ("node1", "node2", "node3"):  # each is silent for a lease, and node0 all the while
            async with agent(coordinator, node, pid=2):
                assert isinstance(await machine.hears(), facts.NodeJoined)
                assert await machine.hears() == facts.NodeLost(
                    NodeId(node), "it answered nothing for 0.3 s", silent=0.3
                )
        assert coordinator.connected == ["node0"]
        assert machine.heard.empty()


async def test_an_agent_whose_next_coordinator_is_lost_before_it_got_there_asks_for_the_one_after_it() -> None:
    first, third = PausedCoordinator(), PausedCoordinator()
    asked = []

    async def leader(request: web.Request) -> web.Response:
        if request.query["when"] == "later":
            await asyncio.sleep(PATIENCE)
        asked.append(after := int(request.query["after"]))
        leaders = {1: Leader(2, "http://127.0.0.1:9"), 2: Leader(3, f"http://127.0.0.1:{third.port}")}
        return reply(leaders[after]) if after in leaders else web.Response(status=410)

    app = web.Application()
    app.add_routes([web.get("/leader", leader)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    for each in (first, third):
        each.go_on()
    async with first.serving(), third.serving():
        settings = config(node=STOP.node, coordinator=f"http://127.0.0.1:{first.port}", near=True, patience=0.3)
        launcher = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with CoordinatorLink(msgspec.structs.replace(settings, launcher=launcher, lease=0.3), fails) as link:
            link.register(store="", copy_endpoint="")
            assert await asyncio.wait_for(orders(link), PATIENCE) == [STOP, STOP]
    await runner.cleanup()
    assert asked == [1, 2, 3]
