"""Nodes that are given back: their ranks leave, move, or wait, fact by fact."""

from tests.unit.membership.elastic_job import (
    ask_back,
    candidates,
    comes,
    drain,
    elastic,
    grown,
    lose,
    phase,
    planned,
    scale,
    stop,
    two_nodes,
)
from tests.unit.membership.membership_job import form

from regrow.core.ids import NO_STATE, NodeId, Rank, StepNo
from regrow.core.messages import facts, orders
from regrow.core.messages.checkpoints import (
    CheckpointWritten,
    FinishCheckpoint,
    PartsWritten,
    SnapshotHeld,
    WriteCheckpoint,
)
from regrow.core.messages.copies import TakeSnapshot
from regrow.core.records import GrowthWeighed, IncidentClosed, IncidentOpened, Noted
from regrow.membership.orders import AnswerScale

# --- nodes that are given back ----------------------------------------------------------------------------------------


def test_the_ranks_of_a_node_that_is_given_back_leave_and_then_its_agent_ends() -> None:
    job = two_nodes()
    leaves = {job.of(0), job.of(1)}
    drain(job, "n0")
    at = planned(job)
    stop(job)
    assert {release.worker for release in job.all(orders.ReleaseWorker)} == leaves
    assert [(member.rank, member.node) for member in form(job).members] == [(0, "n1"), (1, "n1")]
    assert form(job).stores == ["store1"]
    job.joined().stepped(at)
    closed = job.last(IncidentClosed)
    assert (closed.kind, closed.rung, closed.before, closed.after) == ("preempt", "shrink", 4, 2)
    assert not job.all(orders.StopNode)
    for worker in leaves:
        job.exited(worker, 0)
    assert [order.node for order in job.all(orders.StopNode)] == ["n0"]
    job.tell(facts.NodeStopped(NodeId("n0")))
    assert len(job.all(IncidentOpened)) == 1, "its end is no fault"
    assert job.machine.snapshot().wanted == 4
    comes(job, "n0", 2)
    assert len(candidates(job)) == 2, "and it may come again"


def test_a_node_without_a_rank_is_told_where_the_others_go_on_before_it_ends() -> None:
    job = two_nodes()
    drain(job, "n0")
    at = planned(job)
    assert not job.all(orders.NoteGeneration), "all nodes have ranks"
    leaves = [job.of(0), job.of(1)]
    stop(job)
    assert job.all(orders.NoteGeneration) == [orders.NoteGeneration(NodeId("n0"), form(job).generation, StepNo(at))]
    for worker in leaves:
        job.exited(worker, 0)
    kinds = [type(command) for command in job.said]
    assert kinds.index(orders.NoteGeneration) < kinds.index(orders.StopNode)


def test_an_agent_that_ends_before_its_ranks_have_left_is_done_without() -> None:
    job = two_nodes()
    drain(job, "n1")
    stop(job, 0, 1)
    for worker in (job.of(2), job.of(3)):
        job.exited(worker)
    job.tell(facts.NodeStopped(NodeId("n1")))
    assert [(member.rank, member.node) for member in form(job).members] == [(0, "n0"), (1, "n0")]
    assert [node.left for node in job.machine.snapshot().nodes] == [False, True]


def test_ranks_move_to_another_node_where_there_may_be_no_fewer() -> None:
    job = two_nodes(min_replicas=4)
    comes(job, "n2", 2)
    drain(job, "n1")
    newcomers = candidates(job)
    leaves = {job.of(2), job.of(3)}
    for worker in newcomers:
        job.ready(worker, NO_STATE)
    stop(job)
    assert [member.worker for member in form(job).members] == [job.of(0), job.of(1), *newcomers]
    assert {release.worker for release in job.all(orders.ReleaseWorker)} == leaves
    job.joined().stepped(job.machine.step)
    closed = job.last(IncidentClosed)
    assert (closed.kind, closed.rung, closed.before, closed.after) == ("preempt", "node", 4, 4)


def test_the_only_node_with_the_state_is_not_left_before_another_has_it() -> None:
    job = elastic(1, slots=1, max_replicas=2)
    comes(job, "n1", 1)
    drain(job, "n0")
    grown_by = candidates(job)
    assert len(grown_by) == 1
    job.ready(grown_by[0], NO_STATE)
    stop(job)
    assert (len(form(job).members), form(job).holders) == (2, [0])
    job.joined().stepped(job.machine.step)
    stop(job)
    assert [member.worker for member in form(job).members] == grown_by


def test_a_node_that_drains_while_it_alone_has_the_state_gives_it_first() -> None:
    job = two_nodes(min_replicas=2)
    lost = [job.of(2), job.of(3)]
    for worker in lost:
        job.exited(worker)
    drain(job, "n0")
    job.halted(0, 6)
    job.halted(1, 6)
    job.ready(job.of(2))
    job.ready(job.of(3))
    assert (form(job).holders, len(form(job).members)) == ([0, 1], 4)
    job.joined().stepped(6)
    stop(job)
    assert {member.node for member in form(job).members} == {"n1"}


def test_too_few_places_elsewhere_the_others_wait_with_the_state() -> None:
    job = two_nodes(min_replicas=4)
    drain(job, "n1")
    leaves = {job.of(2), job.of(3)}
    stop(job)
    assert {release.worker for release in job.all(orders.ReleaseWorker)} == leaves
    for worker in leaves:
        job.exited(worker, 0)
    assert phase(job) == "waiting"
    assert [order.node for order in job.all(orders.StopNode)] == []
    comes(job, "n2", 2)
    assert not job.all(orders.StopNode), "its agent is to hear where the others go on"
    job.ready(job.of(2))
    job.ready(job.of(3))
    assert [member.node for member in form(job).members] == ["n0", "n0", "n2", "n2"]
    assert [order.node for order in job.all(orders.NoteGeneration)] == ["n1"]
    assert [order.node for order in job.all(orders.StopNode)] == ["n1"]


def test_a_job_on_one_node_that_is_given_back_is_saved_at_once() -> None:
    job = elastic(2, slots=2, durable=True, checkpoint_every=1e6)
    drain(job, "n0")
    stop(job)
    step = job.machine.step
    assert job.last(TakeSnapshot) == TakeSnapshot(job.of(0), step)
    job.tell(SnapshotHeld(job.of(0), step, step))
    write = job.last(WriteCheckpoint)
    job.tell(PartsWritten(write.node, write.attempt, write.step, write.ranks, 10, 0.1))
    finish = job.last(FinishCheckpoint)
    job.tell(CheckpointWritten(finish.node, finish.attempt, finish.step, "folder", 10))
    assert job.end.code == 75
    assert "n0 is given back" in job.end.diagnosis


def test_where_nothing_can_be_saved_training_goes_on_until_the_node_is_gone() -> None:
    job = elastic(2, slots=2)
    drain(job, "n0")
    assert phase(job) == "training"
    said = "n0 is given back: its time is over; no other node can hold the state"
    assert any(said in note.text for note in job.all(Noted))
    job.stepped(5).stepped(6)
    assert sum("no other node" in note.text for note in job.all(Noted)) == 1


def test_where_the_grace_is_too_short_for_a_step_all_are_halted_at_once() -> None:
    job = two_nodes()
    drain(job, "n1", grace=1.1)
    assert job.last(orders.HaltGeneration).at is None
    stop(job, at=5)
    assert {member.node for member in form(job).members} == {"n0"}


def test_a_node_that_stays_too_short_is_a_spare_and_not_grown_onto() -> None:
    job = grown(elastic(2, slots=3, max_replicas=8), 3)
    comes(job, "n1", 2, stay=job.last(IncidentClosed).total / 4)
    assert not job.last(GrowthWeighed).grows
    assert not candidates(job)
    comes(job, "n2", 2, stay=1e6)
    assert job.last(GrowthWeighed).grows
    assert {job.machine.roster.workers[worker].node for worker in candidates(job)} == {"n2"}


def test_the_state_of_a_world_that_was_halted_is_told_once() -> None:
    job = elastic()
    scale(job, 3)
    job.ready(candidates(job)[0], NO_STATE)
    at = planned(job)
    job.tell(facts.WorkerHalted(job.of(0), job.machine.generation, StepNo(at)))
    job.tell(facts.WorkerHalted(job.of(0), job.machine.generation, StepNo(at + 1)))
    job.halted(1, at)
    assert form(job).step == at
    job.tell(facts.WorkerResumed(job.of(Rank(0)), job.machine.generation))
    job.tell(facts.TimeAdvanced())
    assert len(job.all(IncidentOpened)) == 1


def test_a_node_that_is_given_back_while_its_candidates_build_is_done_without() -> None:
    job = elastic(2, slots=2)
    comes(job, "n1", 2)
    building = candidates(job)
    assert len(building) == 2
    job.ready(building[0], NO_STATE)
    drain(job, "n1")
    assert {order.worker for order in job.all(orders.FenceWorker)} == set(building)
    assert not job.all(orders.HaltGeneration), "those who train are not disturbed"
    for worker in building:
        job.exited(worker, -9)
    assert [order.node for order in job.all(orders.StopNode)] == ["n1"]
    job.stepped(5)
    assert (phase(job), job.all(IncidentOpened)) == ("training", [])
    comes(job, "n2", 2)
    assert [job.machine.roster.workers[each].node for each in candidates(job)[-2:]] == ["n2", "n2"]


# --- what is refused --------------------------------------------------------------------------------------------------


def test_a_node_that_is_asked_back_is_given_back_as_one_that_announces_it() -> None:
    job = two_nodes()
    assert ask_back(job, "n0") == AnswerScale(True, "n0 is given back; its ranks have 60 s to leave it")
    at = planned(job)
    stop(job)
    assert [(member.rank, member.node) for member in form(job).members] == [(0, "n1"), (1, "n1")]
    job.joined().stepped(at)
    assert job.last(IncidentClosed).kind == "preempt"


def test_a_node_that_is_not_there_is_not_given_back() -> None:
    job = two_nodes()
    assert ask_back(job, "n7") == AnswerScale(False, "this job has no node n7; its nodes are: n0, n1")
    lose(job, "n1")
    assert ask_back(job, "n1", certain=True) == AnswerScale(False, "this job has no node n1; its nodes are: n0")
    assert not any(node.draining for node in job.machine.snapshot().nodes)


def test_a_node_is_given_back_once() -> None:
    job = two_nodes()
    assert ask_back(job, "n0").accepted
    until = job.machine.roster.nodes[NodeId("n0")].leave_by
    again = ask_back(job, "n0")
    assert not again.accepted and "n0 is given back already (an operator asks for it)" in again.reason
    assert job.machine.roster.nodes[NodeId("n0")].leave_by == until
    assert ask_back(job, "n0", certain=True).accepted, "its launcher may have less time"


def test_a_node_without_which_there_are_too_few_replicas_is_kept_and_nobody_stops() -> None:
    job = two_nodes(min_replicas=3)
    refused = ask_back(job, "n0")
    assert not refused.accepted
    assert refused.reason.startswith("without n0 there is room for 2 replicas, and this job needs at least 3 (")
    assert not job.all(orders.HaltGeneration) and not any(node.draining for node in job.machine.snapshot().nodes)
    comes(job, "n2", slots=1)
    assert ask_back(job, "n0").accepted, "there is room elsewhere"


def test_a_node_that_goes_in_any_case_is_never_refused() -> None:
    job = two_nodes(min_replicas=3)
    assert ask_back(job, "n0", certain=True).accepted
    assert [node.draining for node in job.machine.snapshot().nodes] == [True, False]


def test_the_nodes_of_a_world_that_can_have_no_other_size_are_kept() -> None:
    job = two_nodes()
    for worker in job.machine.roster.placed():
        worker.fixed = "the script has no session.steps"
    refused = ask_back(job, "n0")
    assert not refused.accepted
    assert "cannot have fewer than its 4: the script has no session.steps" in refused.reason


def test_two_nodes_cannot_both_be_given_back_where_one_must_stay() -> None:
    job = two_nodes()
    assert ask_back(job, "n0").accepted
    assert not ask_back(job, "n1").accepted


def test_no_node_is_given_back_after_the_last_step() -> None:
    job = two_nodes()
    for rank in job.ranks:
        job.finished(rank, 6)
    assert ask_back(job, "n0") == AnswerScale(False, "the job has run its last step")
