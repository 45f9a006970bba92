"""The table of a generation: how it is told as a change, to whom it is sent, and what that costs the coordinator."""

from collections import Counter
from collections.abc import Iterable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.membership.membership_job import Job, form, mend

from regrow.core.errors import ProtocolError
from regrow.core.ids import Generation, JobId, NodeId, Rank, StepNo, WorkerId
from regrow.core.job import JobSpec
from regrow.core.messages import facts
from regrow.core.messages.tables import (
    ChangeTable,
    FetchTable,
    GenerationTable,
    JoinGeneration,
    KeepTable,
    TableChange,
    TableHead,
    TableMissed,
    ranks_of,
    runs_of,
)
from regrow.core.messages.unions import AgentOrder, Fact
from regrow.core.messages.vocabulary import Member, Warmth
from regrow.membership.machine import Membership
from regrow.membership.roster import NodeRecord
from regrow.membership.tables import DIRECT, WIDTH, Tables, difference


def member(rank: int, name: str = "") -> Member:
    return Member(Rank(rank), WorkerId(name or f"w{rank}"), NodeId(f"n{rank // 2}"), rank % 2, f"at {name or rank}")


def table(names: Iterable[str], stores: Iterable[str] = (), *, number: int = 1, since: int = 0) -> GenerationTable:
    members = [member(rank, name) for rank, name in enumerate(names)]
    head = TableHead(Generation(number), len(members), number, since, StepNo(number), [(0, len(members) - 1)])
    return GenerationTable(head, list(stores), members)


names = st.lists(st.sampled_from("abcdef"), min_size=1, max_size=12)


@given(names, names, names, names)
def test_a_change_makes_the_table_of_the_one_before(
    before: list[str], after: list[str], stores: list[str], others: list[str]
) -> None:
    base, meant = table(before, stores), table(after, others, number=2, since=1)
    change = difference(base, meant)
    assert change is not None
    told = msgspec.msgpack.decode(msgspec.msgpack.encode(change), type=TableChange)
    assert told.applied_to(base) == meant
    assert len(told.members) == sum(rank >= len(before) or before[rank] != name for rank, name in enumerate(after))


@given(st.sets(st.integers(0, 40)))
def test_runs_are_ranks(ranks: set[int]) -> None:
    assert ranks_of(runs_of(map(Rank, sorted(ranks)))) == sorted(ranks)


def test_a_change_that_leaves_a_place_empty_is_none() -> None:
    base = table("ab", ["s"])
    head = TableHead(Generation(2), 3, 2, 1)
    for wrong in (
        TableChange(head, 1, [], []),
        TableChange(head, 1, [(-1, "t")], [member(2)]),
        TableChange(head, 1, [], [member(2), member(7)]),
        TableChange(head, 2, [], [member(2)]),
        TableChange(msgspec.structs.replace(head, since=7), 1, [], [member(2)]),
        TableChange(head, 1, [(4, "s")], [member(2)]),
    ):
        with pytest.raises(ProtocolError):
            wrong.applied_to(base)
    with pytest.raises(ProtocolError):
        msgspec.structs.replace(table("abc"), members=[member(0), member(2), member(1)]).checked()


# --- to whom it goes --------------------------------------------------------------------------------------------------


def test_whoever_has_the_last_table_is_told_what_is_new_in_it_and_a_node_that_came_back_gets_the_whole() -> None:
    job = Job(6, nodes=3).trained()
    assert not job.all(ChangeTable), "nobody had a table before the first generation"
    mend(job, 0, 1)
    changes = job.all(ChangeTable)
    assert [(order.node, len(order.change.members)) for order in changes] == [("n0", 1), ("n1", 1), ("n2", 1)]
    said = len(job.said)
    job.tell(facts.NodeLost(NodeId("n1"), "gone"))
    for rank in (0, 1, 4, 5):
        job.halted(rank, 2)
    job.tell(facts.NodeJoined(NodeId("n1"), "host", 2, "new store"))
    for rank in (2, 3):
        job.ready(job.of(rank))
    assert {order.node for order in job.said[said:] if isinstance(order, KeepTable)} == {"n1"}
    changed = [order for order in job.said[said:] if isinstance(order, ChangeTable)]
    assert {(order.node, len(order.change.members), *order.change.stores) for order in changed} == {
        ("n0", 2, (1, "new store")),
        ("n2", 2, (1, "new store")),
    }
    assert form(job).stores == ["store0", "new store", "store2"]


def test_a_change_refers_to_the_generation_that_stood_last_not_to_one_that_was_only_ordered() -> None:
    job = Job(4, nodes=2).trained()
    stood = job.last(KeepTable).table.head.number
    for round_ in range(3):
        job.exited(job.of(0))
        for other in (1, 2, 3):
            job.halted(other, 1)
        job.ready(job.of(0))
        assert {order.change.head.since for order in job.all(ChangeTable)[-2:]} == {stood}, round_
    job.joined().stepped(1)
    mend(job, 3, 2)
    assert {order.change.head.since for order in job.all(ChangeTable)[-2:]} == {stood + 3}


def test_a_node_that_has_missed_a_table_is_sent_it() -> None:
    job = Job(4, nodes=2).trained()
    mend(job, 0, 1)
    newest = job.machine.tables.newest
    assert newest is not None
    number = newest.head.number
    assert job.tell(TableMissed(NodeId("n1"), number)) == [KeepTable(NodeId("n1"), newest)]
    assert job.tell(TableMissed(NodeId("n1"), number - 1)) == [KeepTable(NodeId("n1"), newest)]
    assert job.tell(TableMissed(NodeId("n1"), number + 1)) == []


def nodes(count: int) -> list[NodeRecord]:
    return [NodeRecord(NodeId(f"n{each}"), each, "host", f"store{each}") for each in range(count)]


@pytest.mark.parametrize("have", [0, 3, 40])
@pytest.mark.parametrize("count", [DIRECT, DIRECT + 1, 300, 2000])
def test_above_so_many_nodes_tables_go_through_a_tree(count: int, have: int) -> None:
    tables, there = Tables(), nodes(count + have)
    stores, members = {node.store: node.node for node in there}, [member(rank) for rank in range(2 * len(there))]
    tables.spread(TableHead(Generation(1), len(members)), there, members)
    tables.formed(there[:have])
    orders = tables.spread(TableHead(Generation(2), len(members)), there, members)
    depths: dict[str, int] = {}
    passed_on: Counter[str] = Counter()
    for order in orders:
        assert order.node not in depths, "each node is told once"
        if isinstance(order, FetchTable):
            source = stores[order.source]
            passed_on[source] += 1
            depths[order.node] = depths[source] + 1  # whom it asks was told of before it
            assert order.within == pytest.approx(2.0 * depths[order.node]), "who is further down waits longer"
        else:
            depths[order.node] = 0
    assert depths.keys() == set(stores.values())
    assert max(passed_on.values(), default=0) <= WIDTH and max(depths.values()) <= 4
    wholes = [order for order in orders if isinstance(order, KeepTable)]
    assert len(wholes) == (count if count <= DIRECT else max(0, WIDTH - have))


# --- what it costs ----------------------------------------------------------------------------------------------------


class Sent:
    """A machine, and the bytes that its coordinator sends."""

    def __init__(self, count: int, nproc: int = 8) -> None:
        spec = JobSpec(JobId("bytes"), nproc, count, 0, Warmth.BUILT, 100, 3600.0, None, False)
        self.machine, self.now, self.bytes, self.count = Membership(spec), 0.0, 0, count
        self._encoder = msgspec.msgpack.Encoder()

    def tell(self, news: Iterable[Fact]) -> None:
        for fact in news:
            self.now += 0.001
            for command in self.machine.handle(fact, self.now):
                if isinstance(command, AgentOrder):
                    self.bytes += len(self._encoder.encode(command))

    def build(self) -> None:
        self.tell(facts.NodeJoined(NodeId(f"n{n}"), f"host{n}", 8, f"tcp:10.0.{n}:40000") for n in range(self.count))

    def ready(self, workers: Iterable[WorkerId], state: int) -> None:
        self.tell(facts.WorkerReady(each, StepNo(state), f"tcp:10.0.0.1:{each}", "layout") for each in workers)

    @property
    def workers(self) -> list[WorkerId]:
        return list(self.machine.roster.places.values())

    def bytes_a_rank(self) -> float:
        sent, self.bytes = self.bytes, 0
        return sent / len(self.workers)


def cost(count: int) -> tuple[float, float, float]:
    """Bytes a rank of the coordinator: all are started, they form, a whole node is replaced."""
    job = Sent(count)
    job.build()
    started = job.bytes_a_rank()
    job.ready(job.workers, 0)
    formed = job.bytes_a_rank()
    job.tell(facts.WorkerResumed(worker, job.machine.generation) for worker in job.workers)
    lost, survivors, generation = job.workers[8:16], [*job.workers[:8], *job.workers[16:]], job.machine.generation
    job.tell(facts.WorkerExited(worker, -9, job.now) for worker in lost)
    job.tell(facts.WorkerHalted(worker, generation, StepNo(0)) for worker in survivors)
    job.ready([worker for worker in job.workers if worker not in set(survivors)], -1)
    assert job.machine.generation == generation + 1
    return started, formed, job.bytes_a_rank()


def test_what_the_coordinator_sends_for_a_rank_does_not_grow_with_the_world() -> None:
    small, large = cost(128), cost(512)
    for few, many, most in zip(small, large, (300, 600, 1000), strict=True):
        assert abs(many - few) <= 0.2 * few
        assert max(few, many) < most


def test_an_order_to_a_worker_does_not_grow_with_the_world() -> None:
    job = Job(64, nodes=8, nproc=8)
    orders: list[int] = []
    for rank in job.ranks:
        commands = job.ready(job.of(rank), 0)
        orders += [len(msgspec.msgpack.encode(each)) for each in commands if isinstance(each, JoinGeneration)]
    assert len(orders) == 64 and max(orders) < 120
