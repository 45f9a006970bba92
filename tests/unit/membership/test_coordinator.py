"""The coordinator's I/O, with a scripted machine behind it and real connections in front."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import pytest

from regrow.core.config import Script
from regrow.core.errors import UsageError
from regrow.core.exit_codes import INTERNAL_ERROR
from regrow.core.ids import Generation, Instant, JobId, NodeId, Rank, WorkerId
from regrow.core.job import JobSpec
from regrow.core.messages import facts
from regrow.core.messages.elections import Leader
from regrow.core.messages.orders import ReleaseWorker, SpawnWorker, StopNode
from regrow.core.messages.unions import AgentOrder, Fact
from regrow.core.messages.vocabulary import FaultHow, FaultSpec, Role, Warmth
from regrow.core.records import JobEnded, Noted, Record
from regrow.membership.admission import LOCKED, JoinOffer
from regrow.membership.orders import AnswerScale, Command, Deposed, EndJob
from regrow.membership.server.coordinator import Coordinator

FACTS = JobSpec(JobId("j"), 2, 1, 0, Warmth.IMPORTS, 1, 60.0, None, False)
TOKEN = {"Authorization": "Bearer secret"}
PATIENCE = 30.0
LEASE = 3.0
"""A ping is to be answered within a third of it, also where others use the machine."""


class View(msgspec.Struct):
    phase: str


class ScriptedMachine:
    """Answers each fact with what the test says, and remembers it."""

    def __init__(self, answer: Callable[[Fact], list[Command]] = lambda fact: []) -> None:
        self.spec = FACTS
        self.world = 2
        self.deadline: Instant | None = None
        self.heard: asyncio.Queue[Fact] = asyncio.Queue()
        self._answer = answer

    def handle(self, event: Fact, now: Instant) -> list[Command]:
        self.heard.put_nowait(event)
        return self._answer(event)

    def next_deadline(self) -> Instant | None:
        deadline, self.deadline = self.deadline, None
        return deadline

    def snapshot(self) -> View:
        return View("training")

    async def hears(self) -> Fact:
        return await asyncio.wait_for(self.heard.get(), PATIENCE)


@asynccontextmanager
async def serving(machine: ScriptedMachine, **options: Any) -> AsyncIterator[tuple[Coordinator, list[Record]]]:
    records: list[Record] = []
    async with Coordinator(machine, token="secret", record=records.append, **options) as coordinator:
        yield coordinator, records


class FakeAgent:
    """One end of `/agent`."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket = socket
        self._frame: list[AgentOrder] = []

    async def tells(self, fact: msgspec.Struct) -> None:
        await self.socket.send_bytes(msgspec.msgpack.encode(fact))

    async def gets(self) -> AgentOrder:
        if not self._frame:
            self._frame = await self.gets_frame()
        return self._frame.pop(0)

    async def gets_frame(self) -> list[AgentOrder]:
        body = await asyncio.wait_for(self.socket.receive_bytes(), PATIENCE)
        orders: AgentOrder | list[AgentOrder] = msgspec.msgpack.decode(body, type=AgentOrder | list[AgentOrder])
        return orders if isinstance(orders, list) else [orders]


@asynccontextmanager
async def agent(coordinator: Coordinator, node: str = "node0", pid: int = 1) -> AsyncIterator[FakeAgent]:
    async with (
        aiohttp.ClientSession(f"http://127.0.0.1:{coordinator.port}", headers=TOKEN) as session,
        session.ws_connect("/agent", params={"node": node}) as socket,
    ):
        made = FakeAgent(socket)
        await made.tells(facts.NodeJoined(NodeId(node), "127.0.0.1", 2, "store", pid=pid))
        yield made


STARTED = facts.WorkerStarted(WorkerId("w0"), 7)


def spawn(node: str, worker: str) -> SpawnWorker:
    return SpawnWorker(
        NodeId(node), WorkerId(worker), Role.RANK, Rank(0), 0, 2, Generation(1), restarts=0, resume=False
    )


async def ask(coordinator: Coordinator, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, Any]:
    async with (
        aiohttp.ClientSession(f"http://127.0.0.1:{coordinator.port}", headers=TOKEN | headers) as session,
        session.request(method, path, data=body) as response,
    ):
        return response.status, await response.json()


async def test_facts_go_up_and_orders_go_to_the_node_where_the_worker_lives() -> None:
    def answer(fact: Fact) -> list[Command]:
        match fact:
            case facts.NodeJoined(node="node1"):
                return [spawn("node0", "a"), spawn("node1", "b")]
            case facts.WorkerStarted():
                return [ReleaseWorker(WorkerId("a"))]
            case _:
                return []

    machine = ScriptedMachine(answer)
    async with serving(machine) as (coordinator, _), agent(coordinator, "node0") as zero:
        assert isinstance(await machine.hears(), facts.NodeJoined)
        async with agent(coordinator, "node1", pid=2) as one:
            assert (await zero.gets(), await one.gets()) == (spawn("node0", "a"), spawn("node1", "b"))
            await one.tells(facts.WorkerStarted(WorkerId("b"), 7))
            assert await zero.gets() == ReleaseWorker(WorkerId("a"))


async def test_orders_of_one_moment_come_to_an_agent_in_one_frame_in_their_order() -> None:
    machine = ScriptedMachine(lambda fact: [spawn("node0", f"w{n}") for n in range(5)] if fact == STARTED else [])
    async with serving(machine) as (coordinator, _), agent(coordinator) as first:
        await machine.hears()
        coordinator.submit(STARTED)
        assert await first.gets_frame() == [spawn("node0", f"w{n}") for n in range(5)]


async def test_orders_that_are_long_go_by_themselves() -> None:
    long = [spawn("node0", letter * (1 << 20)) for letter in "abc"]
    machine = ScriptedMachine(lambda fact: list(long) if fact == STARTED else [])
    async with serving(machine) as (coordinator, _), agent(coordinator) as first:
        await machine.hears()
        coordinator.submit(STARTED)
        assert [len(await first.gets_frame()) for _ in range(3)] == [1, 1, 1]


async def test_a_burst_of_facts_asks_for_the_next_deadline_once() -> None:
    machine, asked = ScriptedMachine(), list[None]()
    machine.next_deadline = lambda: asked.append(None)  # type: ignore[method-assign]
    async with serving(machine) as (coordinator, _):
        for _ in range(100):
            coordinator.submit(STARTED)
        await asyncio.sleep(0)
    assert len(asked) == 1 and machine.heard.qsize() == 100


async def test_an_agent_that_hangs_up_is_lost_and_one_that_said_goodbye_is_not() -> None:
    machine = ScriptedMachine()
    async with serving(machine) as (coordinator, _):
        async with agent(coordinator, "node0") as zero:
            await machine.hears()
            await zero.tells(facts.NodeStopped(NodeId("node0")))
            assert await machine.hears() == facts.NodeStopped(NodeId("node0"))
        async with agent(coordinator, "node1"):
            assert isinstance(await machine.hears(), facts.NodeJoined)
        lost = await machine.hears()
        assert isinstance(lost, facts.NodeLost)
        assert lost.node == "node1"


async def test_an_agent_that_connects_again_takes_over_its_own_place_only() -> None:
    machine = ScriptedMachine(lambda fact: [spawn("node0", "a")] if isinstance(fact, facts.WorkerStarted) else [])
    async with serving(machine, lease=LEASE) as (coordinator, _), agent(coordinator, pid=5) as first:
        await machine.hears()
        async with agent(coordinator, pid=6) as stranger:
            alive = asyncio.create_task(first.socket.receive())  # answers pings
            message = await stranger.socket.receive(PATIENCE)
            alive.cancel()
            assert message.type is aiohttp.WSMsgType.CLOSE
            assert message.extra == "node0 is in the job already"
        async with agent(coordinator, pid=5) as again:
            assert isinstance(await machine.hears(), facts.NodeJoined)
            await again.tells(facts.WorkerStarted(WorkerId("a"), 1))
            assert await again.gets() == spawn("node0", "a")


async def test_an_agent_takes_the_place_of_one_that_answers_nothing_any_more() -> None:
    machine = ScriptedMachine(lambda fact: [spawn("node0", "a")] if isinstance(fact, facts.WorkerStarted) else [])
    nodes = [NodeId("node0")]
    async with serving(machine, lease=LEASE, nodes=nodes) as (coordinator, _), agent(coordinator, pid=5) as stopped:
        mourned: list[NodeId] = []
        coordinator.on_node_lost.append(mourned.append)
        await machine.hears()
        async with agent(coordinator, pid=6) as successor:
            ordered = asyncio.create_task(successor.gets())  # answers pings, as the stopped one does not
            lost, joined = await machine.hears(), await machine.hears()
            assert isinstance(lost, facts.NodeLost)
            assert isinstance(joined, facts.NodeJoined)
            assert (lost.node, joined.pid, mourned) == ("node0", 6, ["node0"])
            await successor.tells(facts.WorkerStarted(WorkerId("a"), 1))
            assert isinstance(await machine.hears(), facts.WorkerStarted)
            assert await ordered == spawn("node0", "a")
            # Whoever is stopped and goes on later finds itself shut out, and nobody listens to it.
            with pytest.raises(ConnectionError):
                while True:
                    await stopped.tells(facts.WorkerStarted(WorkerId("late"), 1))
                    await stopped.socket.receive(PATIENCE)
            assert machine.heard.empty()


async def test_the_machine_hears_of_nodes_in_the_jobs_order_and_of_no_others() -> None:
    machine = ScriptedMachine()
    nodes = [NodeId("node0"), NodeId("node1")]
    async with serving(machine, nodes=nodes) as (coordinator, _), agent(coordinator, "node2", pid=3) as stranger:
        assert (await stranger.socket.receive(PATIENCE)).extra == "this job has at most 2 nodes"
        async with agent(coordinator, "node1", pid=2) as one:
            await one.tells(facts.WorkerStarted(WorkerId("x"), 1))
            assert isinstance(await machine.hears(), facts.WorkerStarted)
            assert coordinator.connected == ["node1"]
            async with agent(coordinator, "node0"):
                heard = [await machine.hears(), await machine.hears()]
                assert [fact.node for fact in heard if isinstance(fact, facts.NodeJoined)] == nodes


@pytest.mark.parametrize("path", ["/agent?node=node0", "/status", "/job", "/end"])
async def test_nothing_is_answered_without_the_token(path: str) -> None:
    machine = ScriptedMachine()
    async with serving(machine) as (coordinator, _):
        for header in ("", "Bearer secre", "Bearer secret2", "secret", "Bearer gehäim"):
            status, answer = await ask(coordinator, "GET", path, Authorization=header)
            assert (status, answer["error"]) == (401, "the token is not this job's")
    assert machine.heard.empty()


async def test_words_that_are_no_messages_end_the_connection_and_not_the_coordinator() -> None:
    machine = ScriptedMachine()
    async with serving(machine) as (coordinator, _):
        async with agent(coordinator) as zero:
            await machine.hears()
            await zero.socket.send_bytes(b"\xc1rubbish")
            lost = await machine.hears()
            assert isinstance(lost, facts.NodeLost)
            assert "same version of regrow" in lost.reason
        assert await ask(coordinator, "GET", "/status") == (200, {"phase": "training"})


async def test_a_deadline_of_the_machine_comes_back_as_time_advanced() -> None:
    machine = ScriptedMachine()
    async with serving(machine) as (coordinator, _):
        machine.deadline = 0.0  # long ago
        coordinator.submit(facts.StopRequested("x"))
        assert await machine.hears() == facts.StopRequested("x")
        assert await machine.hears() == facts.TimeAdvanced()


async def test_records_are_written_and_shown_in_order_and_commits_are_shown_only() -> None:
    notes: list[Command] = [Noted(at=1.0, text="one"), Noted(at=2.0, text="two")]
    machine = ScriptedMachine(lambda fact: notes if isinstance(fact, facts.StopRequested) else [])
    async with serving(machine) as (coordinator, records):
        seen: list[Record | facts.NodeProgress] = []
        coordinator.watchers.append(seen.append)
        coordinator.submit(facts.StopRequested("x"))
        coordinator.submit(facts.NodeProgress(NodeId("node0"), []))
        assert records == notes
        assert seen == [*notes, facts.NodeProgress(NodeId("node0"), [])]


async def test_a_watcher_that_fails_is_let_go_and_harms_nobody() -> None:
    machine = ScriptedMachine(lambda fact: [Noted(at=1.0, text="one")])
    async with serving(machine) as (coordinator, records):

        def broken(item: Record | facts.NodeProgress) -> None:
            raise ValueError("cannot draw")

        coordinator.watchers.append(broken)
        coordinator.submit(facts.StopRequested("x"))
        coordinator.submit(facts.StopRequested("x"))
        assert len(records) == 2
        assert "cannot draw" in coordinator.crash


async def test_a_defect_of_the_machine_ends_the_job_and_says_where() -> None:
    def answer(fact: Fact) -> list[Command]:
        raise KeyError("nobody")

    async with serving(ScriptedMachine(answer)) as (coordinator, records), agent(coordinator):
        end = await asyncio.wait_for(coordinator.wait_ended(), PATIENCE)
        assert end.code == INTERNAL_ERROR
        assert end.diagnosis == "regrow's coordinator failed in handling NodeJoined: KeyError: 'nobody'"
        assert 'raise KeyError("nobody")' in coordinator.crash
        assert isinstance(records[-1], JobEnded)


async def test_a_question_that_cannot_be_answered_ends_nothing() -> None:
    machine = ScriptedMachine()

    def broken() -> View:
        raise KeyError("no view")

    machine.snapshot = broken  # type: ignore[method-assign]
    async with serving(machine) as (coordinator, _):
        status, answer = await ask(coordinator, "GET", "/status")
        assert (status, answer["error"]) == (
            500,
            "a defect of regrow: /status cannot be answered; the job goes on",
        )
        assert not coordinator.over
        assert 'raise KeyError("no view")' in coordinator.crash


async def test_an_order_that_cannot_be_sent_ends_the_job_and_says_so() -> None:
    wrong = SpawnWorker(NodeId("node0"), WorkerId("w"), Role.RANK, Rank(0), 0, 2, Generation(1), object(), False)  # type: ignore[arg-type]
    async with serving(ScriptedMachine(lambda fact: [wrong])) as (coordinator, _), agent(coordinator):
        end = await asyncio.wait_for(coordinator.wait_ended(), PATIENCE)
        assert end.code == INTERNAL_ERROR
        assert "failed in sending an order: TypeError" in end.diagnosis


async def test_the_end_is_told_to_who_waits_for_it_and_nothing_is_decided_after() -> None:
    machine = ScriptedMachine(lambda fact: [EndJob(75, "enough")])
    async with serving(machine) as (coordinator, _):
        waiting = asyncio.create_task(ask(coordinator, "GET", "/end"))
        assert await ask(coordinator, "POST", "/stop", b"because") == (202, {})
        assert await machine.hears() == facts.StopRequested("because")
        status, answer = await asyncio.wait_for(waiting, PATIENCE)
        assert (status, answer["code"], answer["diagnosis"]) == (200, 75, "enough")
        assert (await ask(coordinator, "POST", "/stop"))[0] == 409
        coordinator.end(EndJob(1, "too late"))
        assert (await coordinator.wait_ended()).diagnosis == "enough"
    assert machine.heard.empty()


async def test_the_end_of_a_coordinator_in_whose_place_another_was_elected_is_no_end_of_the_job() -> None:
    machine = ScriptedMachine(lambda fact: [Deposed(75, "another was elected", Leader(2, "http://other:1"))])
    async with serving(machine) as (coordinator, records):
        waiting = asyncio.create_task(ask(coordinator, "GET", "/end"))
        coordinator.submit(facts.TimeAdvanced())
        status, answer = await asyncio.wait_for(waiting, PATIENCE)
        assert (status, "code" in answer) == (409, False)
    assert records == [], "the records may be the other one's too"


async def test_one_that_leaves_is_found_by_nobody_who_calls_and_still_has_its_agents() -> None:
    """Launchers whose agents have lost it ask whether it is there: not while its process ends."""
    machine = ScriptedMachine(lambda fact: [spawn("node0", "w1")] if isinstance(fact, facts.NodeProgress) else [])
    async with serving(machine) as (coordinator, _), agent(coordinator) as connected:
        assert isinstance(await machine.hears(), facts.NodeJoined)
        assert (await ask(coordinator, "GET", "/time"))[0] == 200
        await coordinator.let_nobody_in()
        with pytest.raises(aiohttp.ClientConnectorError):
            await ask(coordinator, "GET", "/time")
        await connected.tells(facts.NodeProgress(NodeId("node0"), []))
        assert isinstance(await connected.gets(), SpawnWorker)


async def test_nodes_are_stopped_by_order_and_those_that_do_not_answer_are_named() -> None:
    machine = ScriptedMachine()
    async with (
        serving(machine) as (coordinator, _),
        agent(coordinator, "node0") as zero,
        agent(coordinator, "node1", pid=2) as one,
    ):
        await machine.hears()
        await machine.hears()
        stopping = asyncio.create_task(coordinator.stop_nodes("done", grace=0.0, margin=3.0))
        assert await one.gets() == StopNode(NodeId("node1"), "done", 0.0)
        assert isinstance(await zero.gets(), StopNode)
        await zero.tells(facts.NodeStopped(NodeId("node0")))
        assert await asyncio.wait_for(stopping, PATIENCE) == ["node1"]


async def test_faults_are_taken_for_ranks_of_the_job_only() -> None:
    machine = ScriptedMachine()
    async with serving(machine) as (coordinator, _):
        fault = FaultSpec("f", Rank(1), FaultHow.EXIT)
        assert (await ask(coordinator, "POST", "/kill", msgspec.json.encode(fault)))[0] == 202
        assert await machine.hears() == facts.FaultRequested(fault)
        wrong = msgspec.json.encode(FaultSpec("f", Rank(2)))
        status, answer = await ask(coordinator, "POST", "/kill", wrong)
        assert (status, answer["error"]) == (400, "there is no rank 2")
        assert answer["hint"] == "this job has ranks 0 to 1"
        assert (await ask(coordinator, "POST", "/kill", b"{"))[0] == 400


async def test_a_fault_that_can_never_strike_is_refused_with_the_reason() -> None:
    machine = ScriptedMachine(lambda fact: [AnswerScale(False, "nothing is there")])
    async with serving(machine) as (coordinator, _):
        fault = msgspec.json.encode(FaultSpec("f", Rank(1)))
        status, answer = await ask(coordinator, "POST", "/kill", fault)
        assert (status, answer["error"]) == (409, "nothing is there")


async def test_a_port_in_use_is_said_in_a_sentence() -> None:
    async with serving(ScriptedMachine()) as (first, _):
        with pytest.raises(UsageError, match=f"cannot listen on 127.0.0.1:{first.port}"):
            async with serving(ScriptedMachine(), port=first.port):
                pass


async def test_a_size_that_is_asked_for_is_answered_with_the_machines_own_sentence() -> None:
    def answer(fact: Fact) -> list[Command]:
        return [AnswerScale(fact.replicas == 3, "why")] if isinstance(fact, facts.ScaleRequested) else []

    machine = ScriptedMachine(answer)
    async with serving(machine) as (coordinator, _):
        status, said = await ask(coordinator, "POST", "/scale", b'{"replicas": 3, "stay": 60, "reason": "night"}')
        assert (status, said["accepted"], said["reason"]) == (200, True, "why")
        assert await machine.hears() == facts.ScaleRequested(3, "night", 60.0)
        status, said = await ask(coordinator, "POST", "/scale", b'{"ranks": 7}')
        assert (status, said["accepted"]) == (200, False)
        assert await machine.hears() == facts.ScaleRequested(0, "an operator asked for it", None, 7)
        for wrong in (b"{}", b'{"ranks": 1, "replicas": 1}', b'{"replicas": "all"}'):
            assert (await ask(coordinator, "POST", "/scale", wrong))[0] == 400
        assert (await ask(coordinator, "POST", "/scale", b"{}", Authorization="Bearer other"))[0] == 401
        coordinator.end(EndJob(0, ""))
        assert (await ask(coordinator, "POST", "/scale", b'{"replicas": 3}'))[0] == 409


async def test_a_node_that_is_asked_back_is_answered_with_the_machines_own_sentence() -> None:
    def answer(fact: Fact) -> list[Command]:
        return [AnswerScale(fact.grace == 5, "why")] if isinstance(fact, facts.DrainRequested) else []

    machine = ScriptedMachine(answer)
    async with serving(machine) as (coordinator, _):
        status, said = await ask(coordinator, "POST", "/drain", b'{"node": "node0", "grace": 5, "reason": "dust"}')
        assert (status, said["accepted"], said["reason"]) == (200, True, "why")
        assert await machine.hears() == facts.DrainRequested(NodeId("node0"), 5.0, "dust")
        status, said = await ask(coordinator, "POST", "/drain", b'{"node": "node9", "certain": true}')
        assert (status, said["accepted"], said["reason"]) == (200, False, "why")
        assert await machine.hears() == facts.DrainRequested(
            NodeId("node9"), 30.0, "an operator asked for it", certain=True
        )
        assert (await ask(coordinator, "POST", "/drain", b'{"node": "node0", "grace": -1}'))[0] == 400


async def test_a_node_that_asks_to_join_is_told_all_of_the_job() -> None:
    machine = ScriptedMachine()
    machine.spec = msgspec.structs.replace(FACTS, most_nodes=2)
    async with serving(machine, nodes=[NodeId("node0")]) as (coordinator, _), agent(coordinator, "node0"):
        await machine.hears()
        status, said = await ask(coordinator, "POST", "/join", b"{}")
        assert (status, said["error"]) == (409, "this job takes no further nodes")
        coordinator.offer = JoinOffer(machine.spec, Script("train.py", ["--fast"]), "/work")
        status, said = await ask(coordinator, "POST", "/join", b"{}")
        assert (status, said["node"], said["node_rank"], said["script"]["args"]) == (200, "node1", 1, ["--fast"])
        async with agent(coordinator, "node1", pid=2):
            assert await machine.hears() == facts.NodeJoined(NodeId("node1"), "127.0.0.1", 2, "store", pid=2)
            status, said = await ask(coordinator, "POST", "/join", b"{}")
            assert (status, said["error"]) == (LOCKED, "this job has at most 2 nodes")
