"""What people and agents are told while one machine has failed and another does not know enough yet."""

from typing import Any

import pytest

from regrow.core.ids import Instant, JobId, NodeId
from regrow.core.job import JobSpec
from regrow.core.messages import (
    DrainRequested,
    Fact,
    NodeDraining,
    NodeJoined,
    NodeReport,
    ReportNode,
    ScaleRequested,
    SpawnWorker,
    StopRequested,
    Warmth,
)
from regrow.membership.machine import Membership
from regrow.membership.orders import AnswerScale, EndJob
from regrow.membership.restartable import RestartableMachine
from regrow.membership.succession.memory import JobMemory

FACTS = JobSpec(JobId("j"), 1, 2, 0, Warmth.IMPORTS, 10, 60.0, None, False)
NODES = [NodeId("node0"), NodeId("node1")]


class Fragile(Membership):
    """Fails at a drain that one may refuse."""

    def decide(self, event: Fact, now: Instant) -> None:
        if isinstance(event, DrainRequested) and not event.certain:
            raise KeyError("drain")
        super().decide(event, now)


def make(memory: JobMemory | None) -> Membership:
    return Fragile(FACTS, memory=memory)


@pytest.fixture
def failed() -> RestartableMachine:
    """Two nodes build; the machine has failed and asks both."""
    machine = RestartableMachine(make)
    for node in NODES:
        machine.handle(NodeJoined(node, node, 1, f"{node}:1"), 1.0)
    commands = machine.handle(DrainRequested(NODES[1], 30.0, "x"), 2.0)
    assert [command.node for command in commands if isinstance(command, ReportNode)] == NODES
    assert [command.accepted for command in commands if isinstance(command, AnswerScale)] == [False]
    return machine


def report(machine: RestartableMachine) -> list[Any]:
    return [command for node in NODES for command in machine.handle(NodeReport(node, 1, []), 3.0)]


def test_who_asks_for_another_size_is_told_to_ask_again(failed: RestartableMachine) -> None:
    assert [type(command) for command in failed.handle(ScaleRequested(1, "x"), 2.5)] == [AnswerScale]


def test_a_node_that_goes_in_any_case_is_not_refused_and_is_given_back_afterwards(failed: RestartableMachine) -> None:
    (answer,) = failed.handle(DrainRequested(NODES[1], 30.0, "preempted", certain=True), 2.5)
    assert isinstance(answer, AnswerScale) and answer.accepted
    assert failed.machine.roster.nodes[NODES[1]].leave_by is None
    report(failed)
    assert failed.machine.roster.nodes[NODES[1]].leave_reason == "preempted"


def test_what_agents_and_signals_say_meanwhile_is_heard_afterwards(failed: RestartableMachine) -> None:
    assert failed.handle(NodeDraining(NODES[1], 30.0, "SIGUSR1"), 2.5) == []
    assert failed.handle(StopRequested("Ctrl-C"), 2.6) == []
    commands = report(failed)
    assert failed.machine.roster.nodes[NODES[1]].leave_reason == "SIGUSR1"
    assert isinstance(commands[-1], EndJob) and "Ctrl-C" in commands[-1].diagnosis


def test_nothing_is_started_where_all_must_leave_as_was_heard_meanwhile(failed: RestartableMachine) -> None:
    failed.handle(NodeDraining(NODES[1], 30.0, "SIGUSR1"), 2.5)
    assert [command.node for command in report(failed) if isinstance(command, SpawnWorker)] == []
    assert failed.machine.roster.nodes[NODES[1]].leave_by == 32.5, "the notice has run since it was given"


def test_workers_of_which_no_agent_knows_are_started_anew(failed: RestartableMachine) -> None:
    spawned = [command.worker for command in report(failed) if isinstance(command, SpawnWorker)]
    assert spawned == ["node0.w1", "node1.w1"], "their names are not given again"
