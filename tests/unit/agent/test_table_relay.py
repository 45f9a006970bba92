"""Tables in an agent: orders that wait for one, and tables that agents pass to one another."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.unit.agent.test_agent_environment import config
from tests.unit.membership.test_tables import table

from regrow.agent.held_tables import Feasible, HeldTables
from regrow.agent.store.server import StoreServer
from regrow.agent.table_relay import TableRelay
from regrow.core.errors import ProtocolError
from regrow.core.ids import Generation, NodeId, Rank, WorkerId
from regrow.core.messages import orders
from regrow.core.messages.tables import ChangeTable, FetchTable, GenerationTable, JoinGeneration, KeepTable, TableMissed
from regrow.membership.tables import difference

NODE = NodeId("n0")
RANKS = {"a": 0, "b": 1, "c": 1, "z": 1}


def join(worker: str, number: int) -> JoinGeneration:
    return JoinGeneration(WorkerId(worker), Rank(RANKS[worker]), Generation(number), number)


def change(base: GenerationTable, meant: GenerationTable) -> ChangeTable:
    made = difference(base, meant)
    assert made is not None
    return ChangeTable(NODE, made)


def forms(feasible: list[Feasible]) -> list[tuple[WorkerId, int]]:
    return [(each.worker, each.rank) for each in feasible if isinstance(each, orders.FormGeneration)]


FIRST = table("ab")
SECOND = table("ac", number=2, since=1)


def test_an_order_is_completed_from_the_table_and_waits_where_that_is_on_its_way() -> None:
    held = HeldTables()
    assert held.take(FetchTable(NODE, 1, "there", 1.0)) == [] and held.missing == 1
    assert held.take(join("b", 1)) == [] and held.take(join("a", 1)) == []
    found = held.keep(FIRST)
    assert found[0] is FIRST and forms(found) == [("b", 1), ("a", 0)] and held.missing == 0
    (formed,) = held.take(join("b", 1))
    assert isinstance(formed, orders.FormGeneration)
    assert (formed.members, formed.holders, formed.step) == (FIRST.members, [0, 1], 1)


def test_a_change_is_made_to_the_last_that_stood_also_where_others_came_between() -> None:
    held = HeldTables()
    held.take(KeepTable(NODE, FIRST))
    held.take(change(FIRST, SECOND))
    third = table("dc", number=3, since=1)
    assert held.take(change(FIRST, third)) == [third]
    assert held.get(2) is None, "what never stood is forgotten"
    fourth = table("de", number=4, since=3)
    assert held.take(change(third, fourth)) == [fourth] and held.get(1) is None


def test_a_change_to_a_table_that_is_not_here_is_missed_and_the_whole_comes_instead() -> None:
    held = HeldTables()
    assert held.take(change(FIRST, SECOND)) == [] and held.missing == 2
    assert held.take(join("c", 2)) == []
    assert forms(held.take(KeepTable(NODE, SECOND))) == [("c", 1)] and held.missing == 0


def test_who_is_halted_or_fenced_meanwhile_does_not_enter_the_generation() -> None:
    held = HeldTables()
    for worker, rank in zip("abc", range(3), strict=True):
        held.take(JoinGeneration(WorkerId(worker), Rank(rank), Generation(1), 1))
    halt, fence = (
        orders.HaltGeneration(WorkerId("a"), Generation(1), "over"),
        orders.FenceWorker(NODE, WorkerId("b"), "late"),
    )
    assert held.take(halt) == [halt] and held.take(fence) == [fence]
    assert forms(held.keep(table("abc"))) == [("c", 2)]


def test_what_comes_late_or_twice_changes_nothing() -> None:
    held = HeldTables()
    held.take(join("a", 1))
    held.take(KeepTable(NODE, SECOND))
    assert held.take(KeepTable(NODE, FIRST)) == [] and held.take(FetchTable(NODE, 1, "there", 1.0)) == []
    assert held.take(change(FIRST, SECOND)) == [] and held.take(join("a", 1)) == []
    assert held.missing == 0 and held.is_over(1)


def test_a_worker_that_is_not_in_the_table_is_not_told_anything() -> None:
    held = HeldTables()
    held.take(KeepTable(NODE, FIRST))
    with pytest.raises(ProtocolError, match="not in its table"):
        held.take(join("z", 1))


# --- between agents ---------------------------------------------------------------------------------------------------


class Agent:
    """The relay of an agent behind the real store server, and what it does."""

    def __init__(self, folder: Path) -> None:
        self.tasks: set[asyncio.Task[None]] = set()
        self.done: list[Feasible] = []
        self.missed: list[TableMissed] = []
        self.news = asyncio.Event()
        self.server = StoreServer(config(socket_dir=str(folder), local=True), lambda asked: self.relay.answer(asked))
        self.relay = TableRelay(
            NodeId(folder.name), do=self._do, report=self._tell, ask=self.server.peers.ask, start=self._start
        )

    def _do(self, feasible: Feasible) -> None:
        self.done.append(feasible)
        self.news.set()

    def _tell(self, fact: TableMissed) -> None:
        self.missed.append(fact)
        self.news.set()

    def _start(self, work: object) -> None:
        self.tasks.add(asyncio.create_task(work))  # type: ignore[arg-type]

    async def hears(self) -> None:
        await asyncio.wait_for(self.news.wait(), 20.0)
        self.news.clear()


@asynccontextmanager
async def agents(folder: Path, count: int) -> AsyncIterator[list[Agent]]:
    made = []
    for number in range(count):
        (folder / f"n{number}").mkdir()
        made.append(Agent(folder / f"n{number}"))
        await made[-1].server.__aenter__()
    try:
        yield made
    finally:
        for agent in made:
            for task in agent.tasks:
                task.cancel()
            await agent.server.__aexit__(None, None, None)


async def test_a_table_goes_from_agent_to_agent_also_where_it_is_asked_for_before_it_is_there(tmp_path: Path) -> None:
    async with agents(tmp_path, 3) as (first, second, third):
        for asker, source in ((third, second), (second, first)):
            asker.relay.obey(FetchTable(NODE, 1, source.server.address, 20.0))
            asker.relay.obey(join("b", 1))
        assert not first.done
        first.relay.obey(KeepTable(NODE, FIRST))
        await third.hears()
        for agent in (second, third):
            assert agent.done[0] == FIRST and forms(agent.done) == [("b", 1)] and not agent.missed


async def test_where_the_other_agent_dies_the_coordinator_is_asked(tmp_path: Path) -> None:
    async with agents(tmp_path, 2) as (first, second):
        second.relay.obey(FetchTable(NODE, 1, first.server.address, 600.0))
        second.relay.obey(join("b", 1))
        await asyncio.sleep(0)
        await first.server.__aexit__(None, None, None)
        await second.hears()
        assert second.missed == [TableMissed(NodeId("n1"), 1)]
        second.relay.obey(KeepTable(NODE, FIRST))
        assert forms(second.done) == [("b", 1)]


async def test_where_no_answer_comes_in_time_the_coordinator_is_asked(tmp_path: Path) -> None:
    async with agents(tmp_path, 2) as (first, second):
        second.relay.obey(FetchTable(NODE, 1, first.server.address, 0.05))
        await second.hears()
        assert second.missed == [TableMissed(NodeId("n1"), 1)]


async def test_a_later_table_ends_the_wait_for_an_earlier_one(tmp_path: Path) -> None:
    async with agents(tmp_path, 2) as (first, second):
        second.relay.obey(FetchTable(NODE, 1, first.server.address, 600.0))
        await asyncio.sleep(0)
        first.relay.obey(KeepTable(NODE, SECOND))
        await second.hears()
        assert second.missed == [TableMissed(NodeId("n1"), 1)], "the coordinator answers with the newest"
