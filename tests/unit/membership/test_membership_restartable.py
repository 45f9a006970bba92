"""Answers to people and agents while one machine has failed and another does not know enough yet."""

from typing import Any

import pytest

from regrow.core.ids import Generation, Instant, JobId, NodeId, Rank, StepNo, WorkerId
from regrow.core.job import JobSpec
from regrow.core.messages import facts, orders
from regrow.core.messages.succession import NodeReport, ReportNode, WorkerPast
from regrow.core.messages.tables import GenerationTable, JoinGeneration, TableHead
from regrow.core.messages.unions import Fact
from regrow.core.messages.vocabulary import Role, Warmth
from regrow.core.records import WorkerGone, WorldChanged
from regrow.membership.machine import Membership
from regrow.membership.orders import AnswerScale, EndJob
from regrow.membership.restartable import RestartableMachine
from regrow.membership.succession.memory import JobMemory

FACTS = JobSpec(JobId("j"), 1, 2, 0, Warmth.IMPORTS, 10, 60.0, None, False)
NODES = [NodeId("node0"), NodeId("node1")]


class Fragile(Membership):
    """Fails at a drain that one may refuse."""

    def decide(self, event: Fact, now: Instant) -> None:
        if isinstance(event, facts.DrainRequested) and not event.certain:
            raise KeyError("drain")
        super().decide(event, now)


def make(memory: JobMemory | None) -> Membership:
    return Fragile(FACTS, memory=memory)


def ready(worker: WorkerId, node: NodeId, rank: Rank) -> WorkerPast:
    """A worker that stands before its first step."""
    spawn = orders.SpawnWorker(node, worker, Role.RANK, rank, 0, 2, Generation(1), 0, False, [])
    told = facts.WorkerReady(worker, StepNo(0), "host:2", "")
    return WorkerPast(worker, spawn, rank, 0, rank, 0, 2, pid=1, state_at=told.state_at, ready=told)


@pytest.fixture
def failed() -> RestartableMachine:
    """Two nodes build; the machine has failed and asks both."""
    machine = RestartableMachine(make)
    for node in NODES:
        machine.handle(facts.NodeJoined(node, node, 1, f"{node}:1"), 1.0)
    commands = machine.handle(facts.DrainRequested(NODES[1], 30.0, "x"), 2.0)
    assert [command.node for command in commands if isinstance(command, ReportNode)] == NODES
    assert [command.accepted for command in commands if isinstance(command, AnswerScale)] == [False]
    return machine


def report(machine: RestartableMachine) -> list[Any]:
    return [command for node in NODES for command in machine.handle(NodeReport(node, 1, []), 3.0)]


def test_who_asks_for_another_size_is_told_to_ask_again(failed: RestartableMachine) -> None:
    assert [type(command) for command in failed.handle(facts.ScaleRequested(1, "x"), 2.5)] == [AnswerScale]


def test_a_node_that_goes_in_any_case_is_not_refused_and_is_given_back_afterwards(failed: RestartableMachine) -> None:
    (answer,) = failed.handle(facts.DrainRequested(NODES[1], 30.0, "preempted", certain=True), 2.5)
    assert isinstance(answer, AnswerScale) and answer.accepted
    assert failed.machine.roster.nodes[NODES[1]].leave_by is None
    report(failed)
    assert failed.machine.roster.nodes[NODES[1]].leave_reason == "preempted"


def test_how_long_the_first_start_took_is_known_to_the_next_machine() -> None:
    machine = RestartableMachine(make)
    for node in NODES:
        machine.handle(facts.NodeJoined(node, node, 1, f"{node}:1"), 1.0)
    before = machine.machine
    before.roster.first_build = 7000.0
    machine.handle(facts.DrainRequested(NODES[1], 30.0, "x"), 2.0)
    report(machine)
    assert machine.machine is not before
    assert machine.machine.roster.first_build == 7000.0


def test_what_agents_and_signals_say_meanwhile_is_heard_afterwards(failed: RestartableMachine) -> None:
    assert failed.handle(facts.NodeDraining(NODES[1], 30.0, "SIGUSR1"), 2.5) == []
    assert failed.handle(facts.StopRequested("Ctrl-C"), 2.6) == []
    commands = report(failed)
    assert failed.machine.roster.nodes[NODES[1]].leave_reason == "SIGUSR1"
    assert isinstance(commands[-1], EndJob) and "Ctrl-C" in commands[-1].diagnosis


def test_what_was_heard_is_heard_also_where_the_next_machine_fails_as_it_takes_over() -> None:
    failures = [KeyError("take over")]

    class Confused(Fragile):
        def take_over(self, *given: Any) -> list[Any]:
            if failures:
                raise failures.pop()
            return super().take_over(*given)

    machine = RestartableMachine(lambda memory: Confused(FACTS, memory=memory))
    machine.handle(facts.NodeJoined(NODES[0], NODES[0], 1, "host:1"), 1.0)
    machine.handle(facts.DrainRequested(NODES[0], 30.0, "x"), 2.0)
    machine.handle(facts.StopRequested("Ctrl-C"), 2.6)
    (asked,) = (each for each in machine.handle(NodeReport(NODES[0], 1, []), 3.0) if isinstance(each, ReportNode))
    commands = machine.handle(NodeReport(NODES[0], asked.number, []), 4.0)
    assert isinstance(commands[-1], EndJob) and "Ctrl-C" in commands[-1].diagnosis


def test_who_ends_after_its_agents_report_is_in_no_generation_that_is_formed_then(failed: RestartableMachine) -> None:
    workers = [WorkerId(f"{node}.w0") for node in NODES]
    pasts = [ready(worker, node, Rank(rank)) for rank, (worker, node) in enumerate(zip(workers, NODES, strict=True))]
    failed.handle(NodeReport(NODES[0], 1, pasts[:1]), 3.0)
    assert failed.handle(facts.WorkerExited(workers[0], -9, 3.1, memory=True), 3.1) == []
    commands = failed.handle(NodeReport(NODES[1], 1, pasts[1:]), 3.2)
    assert not [command for command in commands if isinstance(command, JoinGeneration)]
    (gone,) = (command for command in commands if isinstance(command, WorkerGone))
    assert (gone.worker, gone.code) == (workers[0], -9) and "memory" in gone.reason
    assert [each.worker for each in commands if isinstance(each, orders.FenceWorker)] == workers[1:], (
        "all are started again"
    )


def test_nothing_is_started_where_all_must_leave_as_was_heard_meanwhile(failed: RestartableMachine) -> None:
    failed.handle(facts.NodeDraining(NODES[1], 30.0, "SIGUSR1"), 2.5)
    assert [command.node for command in report(failed) if isinstance(command, orders.SpawnWorker)] == []
    assert failed.machine.roster.nodes[NODES[1]].leave_by == 32.5, "the notice has run since it was given"


def test_the_notice_of_a_node_that_is_lost_is_none_for_the_next_agent_there(failed: RestartableMachine) -> None:
    report(failed)
    failed.handle(facts.NodeDraining(NODES[1], 30.0, "SIGUSR1"), 4.0)
    assert [given.node for given in failed.remember().given_back] == [NODES[1]]
    failed.handle(facts.NodeLost(NODES[1], "x"), 5.0)
    assert failed.remember().given_back == []


def elected(failed: RestartableMachine) -> RestartableMachine:
    """Another coordinator, which has the memory of the one that was lost, and waits for both agents."""
    return RestartableMachine(make, failed.remember(), NODES, 20.0)


def asks(machine: RestartableMachine) -> bool:
    return machine.entering


def test_a_notice_that_an_elected_coordinator_hears_ends_with_the_node(failed: RestartableMachine) -> None:
    machine = elected(failed)
    machine.handle(facts.NodeJoined(NODES[1], NODES[1], 1, "node1:1"), 5.0)
    machine.handle(facts.NodeDraining(NODES[1], 30.0, "SIGUSR1"), 5.5)
    machine.handle(facts.NodeLost(NODES[1], "x"), 6.0)
    for node, store in zip(NODES, ("node0:1", "node1:2"), strict=True):
        machine.handle(facts.NodeJoined(node, node, 1, store), 7.0)
    for node in NODES:
        machine.handle(NodeReport(node, 1, []), 7.5)
    assert machine.machine.roster.nodes[NODES[1]].leave_by is None


@pytest.mark.parametrize("again", [False, True])
def test_a_notice_is_for_the_agent_that_got_it_wherever_it_turns(failed: RestartableMachine, again: bool) -> None:
    report(failed)
    failed.handle(facts.NodeDraining(NODES[1], 30.0, "SIGUSR1"), 4.0)
    machine = elected(failed)
    for node, store in zip(NODES, ("node0:1", "node1:2" if again else "node1:1"), strict=True):
        machine.handle(facts.NodeJoined(node, node, 1, store), 5.0)
        machine.handle(NodeReport(node, 1, []), 5.0)
    assert machine.machine.roster.nodes[NODES[1]].leave_by == (None if again else 34.0)


def test_an_agent_that_comes_late_to_another_coordinator_has_its_time_to_answer(failed: RestartableMachine) -> None:
    """At 20.0 all must have come; at 30.0 all must have answered."""
    machine = elected(failed)
    machine.handle(facts.NodeJoined(NODES[0], NODES[0], 1, "node0:1"), 9.0)
    machine.handle(NodeReport(NODES[0], 1, []), 9.5)
    machine.handle(facts.NodeJoined(NODES[1], NODES[1], 1, "node1:1"), 19.5)
    assert machine.next_deadline() == 29.5
    assert machine.handle(facts.TimeAdvanced(), 20.0) == []
    machine.handle(NodeReport(NODES[1], 1, []), 29.0)
    assert not asks(machine) and machine.nodes == NODES


def test_an_agent_that_comes_and_answers_nothing_is_lost(failed: RestartableMachine) -> None:
    machine = elected(failed)
    machine.handle(facts.NodeJoined(NODES[0], NODES[0], 1, "node0:1"), 8.0)
    machine.handle(facts.NodeJoined(NODES[1], NODES[1], 1, "node1:1"), 9.0)
    machine.handle(NodeReport(NODES[1], 1, []), 9.5)
    assert machine.next_deadline() == 18.0
    (stop, *_) = machine.handle(facts.TimeAdvanced(), 18.0)
    assert stop == orders.StopNode(NODES[0], "it did not report its workers to the new coordinator within 10 s", 0.0)
    assert not asks(machine) and machine.nodes == NODES[1:]


def test_agents_that_come_again_and_again_keep_no_coordinator_from_its_work(failed: RestartableMachine) -> None:
    machine, now = elected(failed), 10.0
    while asks(machine) and now < 100.0:
        machine.handle(facts.TimeAdvanced(), now)
        if asks(machine):
            for node in NODES:
                machine.handle(facts.NodeJoined(node, node, 1, f"{node}:{now}"), now)
        now += 1.0
    assert now == 31.0


def test_who_is_asked_for_the_newest_table_has_its_time_for_that_too(failed: RestartableMachine) -> None:
    machine = elected(failed)
    for node in NODES:
        machine.handle(facts.NodeJoined(node, node, 1, f"{node}:1"), 10.0)
    machine.handle(NodeReport(NODES[0], 1, []), 10.5)
    (asked,) = machine.handle(NodeReport(NODES[1], 1, [], table=9), 19.0)
    assert asked == ReportNode(NODES[1], 1, table=True)
    assert machine.next_deadline() == 29.0


def test_who_is_asked_for_the_newest_table_has_no_less_time_than_before(failed: RestartableMachine) -> None:
    """If the coordinator is the same one, agents have until `node_deadline`."""
    deadline = failed.next_deadline()
    assert deadline is not None and deadline > 500.0
    failed.handle(NodeReport(NODES[0], 1, []), 3.0)
    (asked,) = failed.handle(NodeReport(NODES[1], 1, [], table=9), 4.0)
    assert asked == ReportNode(NODES[1], 1, table=True)
    assert failed.next_deadline() == deadline


def test_a_world_that_is_built_anew_after_a_failure_says_when_it_has_become_smaller() -> None:
    """It had grown from one replica to two; a node went while the agents were asked."""
    spec = JobSpec(JobId("j"), 1, 1, 0, Warmth.IMPORTS, 10, 60.0, None, True, min_replicas=1, max_replicas=2)
    memory = Membership(spec).remember()
    memory.table = GenerationTable(TableHead(Generation(4), 2, number=4), [], [])
    machine = Membership(spec, memory=memory)
    joined = facts.NodeJoined(NODES[0], "host", 1, "host:1")
    commands = machine.take_over([joined], {NODES[0]: NodeReport(NODES[0], 1, [])}, [], 3.0)
    (worker,) = [command.worker for command in commands if isinstance(command, orders.SpawnWorker)]
    commands = machine.handle(facts.WorkerReady(worker, StepNo(0), "host:2", ""), 4.0)
    assert [(c.before, c.after) for c in commands if isinstance(c, WorldChanged)] == [(2, 1)]


def test_workers_of_which_no_agent_knows_are_started_anew(failed: RestartableMachine) -> None:
    spawned = [command.worker for command in report(failed) if isinstance(command, orders.SpawnWorker)]
    assert spawned == ["node0.w1", "node1.w1"], "their names are not given again"
