"""Voters, their promises, and the handover. Elections under random schedules: tests/schedules."""

import asyncio

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from regrow.core.ids import Generation, JobId, NodeId, Rank, StepNo, WorkerId
from regrow.core.job import JobSpec
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
from regrow.core.messages.observations import ProveAlive
from regrow.core.messages.orders import SpawnWorker
from regrow.core.messages.unions import Fact
from regrow.core.messages.vocabulary import FaultSpec, FaultStage, Role, Warmth
from regrow.core.records import WorkerGone
from regrow.membership.fault_plan import FaultPlan, ScriptErrors
from regrow.membership.incident import Incidents
from regrow.membership.machine import Membership
from regrow.membership.orders import Command, Deposed, EndJob
from regrow.membership.recovery.doubts import Doubt
from regrow.membership.scaling import Change
from regrow.membership.server.launchers import SuccessionApi
from regrow.membership.server.leased import LeasedMachine
from regrow.membership.succession.election import Election
from regrow.membership.succession.late_facts import still_meant
from regrow.membership.succession.memory import GivenBack, JobMemory
from regrow.membership.succession.voters import MOST_VOTERS, PASSED_S, Voters
from regrow.membership.succession.written import MemoryWriter, read

LEASE = 5.0
FACTS = JobSpec(JobId("j"), 2, 1, 0, Warmth.IMPORTS, 1, 60.0, None, False)


def voter(number: int) -> Voter:
    return Voter(f"node{number}@x", NodeId(f"node{number}"), f"host{number}:1")


def answer(voters: Voters, number: int, beat: float) -> None:
    """A launcher answers a beat, and has all that there is."""
    voters.received(LauncherPresent(voter(number), voters.term, voters.number, beat), beat)


def settled(launchers: int) -> Voters:
    voters = Voters(voter(0), 1, LEASE, memory=b"memory")
    for number in range(1, launchers):
        answer(voters, number, 0.0)
    while voters.change(0.0):
        for number in range(1, launchers):
            answer(voters, number, 0.0)
    return voters


def held_by(number: int, launchers: int, now: float = 0.0) -> Election:
    election = Election(voter(number))
    assert election.received(1, settled(launchers).handover(voter(number).name), LEASE, now)
    return election


def test_voters_are_seven_at_most_and_change_one_at_a_time() -> None:
    voters = Voters(voter(0), 1, LEASE)
    for number in range(1, 10):
        answer(voters, number, 0.0)
    assert voters.change(0.0)
    assert len(voters.newest) == 2
    assert not voters.change(0.0), "the last change does not count yet"
    assert len(settled(10).newest) == MOST_VOTERS


def test_a_launcher_that_votes_has_what_a_successor_needs_and_others_know_who_votes() -> None:
    voters = settled(10)
    assert voters.handover("node1@x").memory == b"memory"
    assert voters.handover("node9@x").memory == b""
    assert voters.handover("node9@x").voters == voters.newest


def test_a_coordinator_decides_until_a_quorum_may_be_free() -> None:
    voters = settled(5)
    answer(voters, 1, 3.0)
    answer(voters, 2, 2.0)
    assert voters.may_decide(LEASE + 1.9), "two of five are free"
    assert [each.node for each in voters.free(LEASE + 1.9)] == ["node3", "node4"]
    assert not voters.may_decide(LEASE + 2.0), "three are"


def test_one_that_has_ended_while_it_was_bound_elects_nobody_and_one_that_was_free_may_have() -> None:
    voters = settled(3)
    voters.ended("node1@x", LEASE - 0.1)
    assert voters.may_decide(LEASE)
    late = settled(3)
    late.ended("node1@x", LEASE)
    assert not late.may_decide(LEASE)


def test_a_silent_voter_is_one_no_more_and_a_coordinator_that_is_deposed_decides_nothing() -> None:
    voters = settled(3)
    answer(voters, 1, 4.0)
    assert voters.change(LEASE)
    assert [each.node for each in voters.newest] == ["node0", "node1"]
    voters.deposed_by = Leader(2, "http://host1:1")
    assert not voters.may_decide(LEASE)


def test_a_launcher_votes_once_a_term_and_not_while_the_coordinator_counts_on_it() -> None:
    election = held_by(1, 3)
    version = settled(3).handover("node1@x").version
    assert not election.vote(VoteAsked(2, "node2@x", version).to("node1@x"), LEASE - 0.1)
    assert election.vote(VoteAsked(2, "node2@x", version, trial=True).to("node1@x"), LEASE)
    assert election.vote(VoteAsked(2, "node2@x", version).to("node1@x"), LEASE), "a trial changes nothing"
    assert not election.vote(VoteAsked(2, "node0@x", version).to("node1@x"), LEASE)
    assert not election.received(1, None, LEASE, LEASE), "the coordinator of the older term is none any more"


def test_a_launcher_that_has_voted_votes_for_nobody_else_until_the_elected_one_may_have_begun() -> None:
    election = held_by(1, 4)
    version = settled(4).handover("node1@x").version
    assert election.vote(VoteAsked(2, "node2@x", version).to("node1@x"), LEASE)
    for trial in (True, False):
        assert not election.vote(VoteAsked(3, "node3@x", version, trial=trial).to("node1@x"), LEASE + 1.9)
        assert election.vote(VoteAsked(4 - trial, "node2@x", version, trial=trial).to("node1@x"), LEASE + 1.9)
    assert not election.vote(VoteAsked(5, "node3@x", version).to("node1@x"), LEASE + 3.8), "it has voted again"
    assert election.vote(VoteAsked(5, "node3@x", version).to("node1@x"), LEASE + 4.0)


def test_launchers_stand_in_other_turns_in_each_term_so_that_two_who_shared_the_votes_do_not_share_them_again() -> None:
    elections = [held_by(number, 5) for number in range(1, 5)]
    for term in range(2, 12):
        now, next_at = 100.0 * term, []
        for election in elections:
            assert election.stand(now) is not None
            election.answered(VoteAnswered(False, term))
            turn = now
            while election.stand(turn) is None:
                turn += 0.05
            next_at.append(turn)
        assert len({round(turn - now, 1) for turn in next_at}) == len(elections)
        assert max(next_at) - now < 2.0


@pytest.mark.parametrize(
    "asked",
    [
        VoteAsked(2, "node2@x", (0, 99)),
        VoteAsked(1, "node2@x", (1, 99)),
        VoteAsked(2, "node2@x", (1, 99), voter="node1@y"),
    ],
    ids=["knows less", "comes late", "asks another process that was at this address"],
)
def test_nobody_votes_for_who_knows_less_or_comes_late_or_has_asked_another(asked: VoteAsked) -> None:
    assert not held_by(1, 3).vote(asked if asked.voter else asked.to("node1@x"), LEASE)


def newcomer_stands(term: int = 2) -> VoteAsked:
    """The fourth launcher has the handover with which it has become a voter."""
    election = Election(voter(3))
    assert election.received(1, settled(4).handover("node3@x"), LEASE, 0.0)
    asked = election.stand(100.0)
    assert asked is not None
    return VoteAsked(term, asked.name, asked.version, address=asked.address)


def test_a_launcher_votes_for_one_that_has_a_newer_set_of_voters_though_it_does_not_know_it_as_a_voter() -> None:
    election = held_by(1, 3)
    assert election.handover is not None and len(election.handover.voters) == 3
    assert election.vote(newcomer_stands().to("node1@x"), LEASE)
    assert election.candidates == {"node3@x": "host3:1"}, "there it learns whether that one was elected"


@pytest.mark.parametrize("told", [True, False])
def test_a_launcher_that_has_not_heard_yet_that_it_votes_does_so_when_it_is_asked(told: bool) -> None:
    election = Election(voter(2))
    if told:
        election.received(1, settled(2).handover("node2@x"), LEASE, 0.0)
    assert election.turn is None
    assert not told or not election.vote(newcomer_stands().to("node2@x"), LEASE - 0.1), "the coordinator counts on it"
    assert election.vote(newcomer_stands().to("node2@x"), LEASE)
    assert not election.vote(VoteAsked(2, "node1@x", (1, 99)).to("node2@x"), LEASE + 5.0), "once a term"


def test_majorities_of_two_sets_of_voters_that_follow_one_another_have_a_voter_in_common() -> None:
    for smaller in range(1, MOST_VOTERS):
        sets = [[voter(number) for number in range(count)] for count in (smaller, smaller + 1)]
        quorums = [Handover(1, number, names, NodeId("node0")).quorum for number, names in enumerate(sets)]
        assert sum(quorums) > smaller + 1


def test_who_hosts_the_coordinator_votes_for_nobody_until_that_is_gone_not_even_after_a_pause() -> None:
    election = held_by(1, 3)
    asked = VoteAsked(9, "node2@x", (1, 99)).to("node1@x")
    election.become_leader()
    assert not election.vote(asked, 1000.0) and election.stand(1000.0) is None
    election.released(1000.0)
    assert election.vote(asked, 1000.0)


def test_who_stands_asks_first_and_learns_from_who_refuses_in_which_term_to_stand() -> None:
    election = held_by(1, 3)
    assert election.stand(LEASE) is None, "it is not its turn"
    asked = election.stand(LEASE + 1.0)
    assert asked == VoteAsked(2, "node1@x", settled(3).handover("node1@x").version, trial=True, address="host1:1")
    assert not election.answered(VoteAnswered(False, 7))
    again = election.stand(LEASE + 10.0)
    assert again is not None and again.term == 8
    assert election.campaign(again, LEASE + 10.0) == VoteAsked(8, "node1@x", again.version, address="host1:1")
    assert not election.wins(1) and election.wins(2)


def test_two_launchers_and_one_that_only_follows_stand_never() -> None:
    assert held_by(1, 2).stand(100.0) is None
    assert held_by(9, 10).stand(100.0) is None


def memory() -> JobMemory:
    incidents = Incidents()
    incidents.count, incidents.changes = 3, 2
    incidents.fault("exit", [Rank(1)], "it was killed", generation=2, step=StepNo(7), now=105.0, fault_at=104.0)  # type: ignore[arg-type]
    return JobMemory(
        plan=FaultPlan([FaultSpec("f1", Rank(0), stage=FaultStage.FORWARD, step=StepNo(9))], ["f0"]),
        incidents=incidents,
        errors=ScriptErrors(),
        table=None,
        step=StepNo(7),
        restarts=1,
        resumes=True,
        wanted=4,
        wanted_by="somebody",
        change=Change("grow", 2, "room", 130.0),
        spent=[90.0, 104.0],
        doubt=Doubt(StepNo(6), frozenset({Rank(1), Rank(0)})),
        quarantined={NodeId("n3"): "twice"},
        given_back=[GivenBack(NodeId("n2"), 150.0, "preempted", "n2:1")],
        gone={WorkerId("n1.w1"), WorkerId("n1.w0")},
        named={NodeId("n1"): 4},
        checkpoints=2,
        first_build=300.0,
    )


def test_what_is_handed_over_comes_back_with_times_of_the_other_clock() -> None:
    written = MemoryWriter(lambda: (memory(), [NodeId("n1"), NodeId("n0")])).write()
    back, nodes = read(written, 1000.0)
    known = memory()
    assert nodes == ["n0", "n1"]
    assert back.spent == [1090.0, 1104.0]
    assert back.given_back == [GivenBack(NodeId("n2"), 1150.0, "preempted", "n2:1")]
    assert back.change == Change("grow", 2, "room", 1130.0)
    assert back.incidents.open is not None and back.incidents.count == known.incidents.count
    assert back.incidents.changes == known.incidents.changes == 2
    assert (back.incidents.open.opened_at, back.incidents.open.fault_at) == (1105.0, 1104.0)
    assert back.plan.pending == known.plan.pending and back.plan.struck == ["f0"]
    same = (
        "doubt",
        "quarantined",
        "gone",
        "named",
        "checkpoints",
        "first_build",
        "restarts",
        "resumes",
        "wanted",
        "wanted_by",
        "step",
    )
    assert {name: getattr(back, name) for name in same} == {name: getattr(known, name) for name in same}


def test_steps_alone_are_no_news() -> None:
    present = memory()
    writer = MemoryWriter(lambda: (present, []))
    first = writer.write()
    present.step = StepNo(8)
    assert writer.write() == first
    present.restarts += 1
    assert writer.write() != first
    assert read(writer.write(), 0.0)[0].step == 8


def test_a_handover_is_ordered_by_term_and_number() -> None:
    assert Handover(2, 1, [], NodeId("n0")).version > Handover(1, 9, [], NodeId("n0")).version


async def test_news_that_cannot_be_written_are_told_once_and_are_written_when_they_can_be() -> None:
    told: list[str] = []
    tries = 0
    written = asyncio.Event()

    def remember() -> bytes:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise ValueError("no such incident")
        written.set()
        return b"the newest"

    voters = settled(3)
    async with asyncio.timeout(10), SuccessionApi(voters, remember, "secret", say=told.append) as desk:
        await written.wait()
        assert voters.memory == b"the newest"
        assert len(told) == 1 and "no such incident" in told[0], told
        assert "in remember" in desk.crash


def test_a_coordinator_that_is_deposed_says_by_whom_and_hears_nothing_more() -> None:
    machine, voters = StubMachine(), settled(3)
    leased = LeasedMachine(machine, voters, lambda: None)
    leader = Leader(2, "http://host1:1")
    voters.deposed_by = leader
    (end,) = leased.handle(facts.TimeAdvanced(), 0.0)
    assert isinstance(end, Deposed) and (end.code, end.by) == (75, leader)
    assert machine.heard == []


def test_a_coordinator_whose_voters_have_voted_in_a_later_term_gives_way_so_that_they_can_elect() -> None:
    """They answer it no more, and while it is there those that follow it elect nobody."""
    voters = settled(3)
    leased = LeasedMachine(StubMachine(), voters, lambda: None)
    voters.notified("node9@x", Leader(1, "http://host0:1", voted=2))
    assert not voters.has_later_vote, "that one is no voter"
    voters.notified("node2@x", Leader(1, "http://host0:1", voted=2))
    assert leased.handle(facts.TimeAdvanced(), LEASE - 0.1) == [], "while it may decide it stays"
    assert leased.handle(facts.TimeAdvanced(), LEASE) == []
    assert leased.handle(facts.TimeAdvanced(), LEASE + PASSED_S - 0.1) == [], "somebody may be elected"
    (end,) = leased.handle(facts.TimeAdvanced(), LEASE + PASSED_S)
    assert isinstance(end, Deposed) and end.by is None


@pytest.mark.parametrize("ends", [True, False])
async def test_launchers_are_not_told_that_the_job_has_ended_by_a_coordinator_that_gives_way(
    ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    voters, heard = settled(1), asyncio.Event()
    monkeypatch.setattr(voters, "received", lambda *_: heard.set())
    present = LauncherPresent(voter(1), 1, voters.number)
    app = web.Application()
    async with asyncio.timeout(10), SuccessionApi(voters, lambda: voters.memory, "secret") as desk:
        app.add_routes(desk.routes())
        async with TestClient(TestServer(app)) as client:
            asked = asyncio.create_task(client.post("/launcher", data=msgspec.msgpack.encode(present)))
            await heard.wait()  # and it waits for news
            desk.end() if ends else desk.give_way()
            answer = msgspec.msgpack.decode(await (await asked).read(), type=CoordinatorPresent)
    assert answer.ended is ends


def test_what_an_agent_was_to_do_is_not_sent_to_the_next_one_of_its_node() -> None:
    """Two nodes are lost, and back, while the coordinator may not decide: a worker is started and lost in between."""
    voters = settled(3)
    leased = LeasedMachine(Membership(FACTS), voters, lambda: None)
    joins = [facts.NodeJoined(NodeId(f"node{number}"), "host", 1, f"host:{number}") for number in (0, 1)]
    started = [command for join in joins for command in leased.handle(join, 1.0) if isinstance(command, SpawnWorker)]
    assert [command.worker for command in started] == ["node0.w0", "node1.w0"]
    held: list[Fact] = [
        facts.NodeLost(NodeId("node1"), "x"),
        joins[1],
        facts.WorkerExited(WorkerId("node0.w0"), -9, 6.0),
    ]
    for fact in [*held, facts.NodeLost(NodeId("node1"), "x")]:
        assert leased.handle(fact, 6.0) == []
    answer(voters, 1, 7.0)
    commands = leased.handle(joins[1], 7.0)
    lost = {command.worker: command.code for command in commands if isinstance(command, WorkerGone)}
    assert lost.keys() == {"node0.w0", "node1.w0", "node1.w1"}
    assert [command.worker for command in commands if isinstance(command, SpawnWorker)] == ["node0.w1"]


def test_who_was_to_be_started_by_a_lost_agent_is_told_nothing() -> None:
    orders: list[Command] = [
        SpawnWorker(NodeId("node1"), WorkerId("node1.w3"), Role.STANDBY, Rank(-1), 0, 1, Generation(1), 0, False),
        ProveAlive(WorkerId("node1.w3")),
        ProveAlive(WorkerId("node0.w1")),
    ]
    assert still_meant(orders, facts.NodeLost(NodeId("node0"), "x")) == orders
    assert still_meant(orders, facts.NodeStopped(NodeId("node1"))) == orders[2:]


def test_a_notice_runs_while_the_coordinator_may_not_decide() -> None:
    machine, voters = StubMachine(), settled(3)
    leased = LeasedMachine(machine, voters, lambda: None)
    leased.handle(facts.NodeDraining(NodeId("node1"), 30.0, "SIGTERM"), 6.0)
    answer(voters, 1, 9.0)
    leased.handle(facts.TimeAdvanced(), 9.0)
    assert machine.heard == [facts.NodeDraining(NodeId("node1"), 27.0, "SIGTERM"), facts.TimeAdvanced()]


def test_a_coordinator_that_may_not_decide_stays_while_another_node_tells_of_steps() -> None:
    leased, until = LeasedMachine(StubMachine(), settled(3), lambda: None), LEASE + 100.0
    now = LEASE + 1.0
    while now < until:
        assert leased.handle(facts.NodeProgress(NodeId("node1"), [committed(int(now))]), now) == []
        assert leased.handle(facts.TimeAdvanced(), now) == []
        now += 10.0
    told = now - 10.0
    assert leased.handle(facts.TimeAdvanced(), told + 29.9) == []
    (end,) = leased.handle(facts.TimeAdvanced(), told + 30.0)
    assert isinstance(end, EndJob) and end.code == 75
    assert "node1, node2 answered nothing for 30 s" in end.diagnosis


def test_what_its_own_node_tells_keeps_no_coordinator_that_may_not_decide() -> None:
    leased = LeasedMachine(StubMachine(), settled(3), lambda: None)
    assert leased.handle(facts.TimeAdvanced(), LEASE) == []
    (end,) = leased.handle(facts.NodeProgress(NodeId("node0"), [committed(1)]), LEASE + 30.0)
    assert isinstance(end, EndJob)


def test_of_steps_that_are_told_while_the_coordinator_may_not_decide_the_newest_are_kept() -> None:
    machine, voters = StubMachine(), settled(3)
    leased = LeasedMachine(machine, voters, lambda: None)
    for step in range(50):
        for node in ("node1", "node2"):
            leased.handle(facts.NodeProgress(NodeId(node), [committed(step, f"{node}.w0")]), 6.0)
        leased.handle(facts.TimeAdvanced(), 6.0)
    both = [committed(49, "node1.w0"), committed(49, "node1.w1")]
    leased.handle(facts.NodeProgress(NodeId("node1"), both[1:]), 6.0)
    answer(voters, 1, 7.0)
    leased.handle(facts.TimeAdvanced(), 7.0)
    told = [fact.commits for fact in machine.heard if isinstance(fact, facts.NodeProgress)]
    assert told == [both[:1], [committed(49, "node2.w0")], both[1:]]
    assert machine.heard.count(facts.TimeAdvanced()) == 1


def committed(step: int, worker: str = "node1.w0") -> facts.WorkerCommitted:
    return facts.WorkerCommitted(WorkerId(worker), Generation(1), StepNo(step), 0.0, 0.1)


class StubMachine:
    """Decides nothing, and remembers what it hears."""

    def __init__(self) -> None:
        self.spec = FACTS
        self.world = 2
        self.heard: list[Fact] = []

    def handle(self, event: Fact, now: float) -> list[Command]:
        self.heard.append(event)
        return []

    def next_deadline(self) -> None:
        return None

    def snapshot(self) -> Voter:
        return voter(0)
