"""Nodes that are lost, waited for, and come back; and who keeps copies for whom."""

from typing import Any

import pytest
from tests.unit.membership.membership_job import Job, form, mend

from regrow.core.ids import NodeId, StepNo
from regrow.core.messages import facts, orders
from regrow.core.messages.copies import PlaceCopies
from regrow.core.messages.vocabulary import FaultKind, Role
from regrow.core.records import IncidentClosed, IncidentOpened, Noted, WorkerGone
from regrow.membership.machine import EndJob
from regrow.membership.recovery.placement import NodeDomain, buddies


def lose(job: Job, node: str) -> None:
    job.tell(facts.NodeLost(NodeId(node), "its connection ended"))


def back(job: Job, node: str, store: str = "new store", copy_endpoint: str = "") -> None:
    job.tell(facts.NodeJoined(NodeId(node), "another host", 2, store, copy_endpoint=copy_endpoint, domain="b"))


def survivors_halt(job: Job, ranks: tuple[int, ...], state: int) -> None:
    for rank in ranks:
        job.halted(rank, state)


def two_nodes(**changes: Any) -> Job:
    """Ranks 0 and 1 on n0, ranks 2 and 3 on n1."""
    return Job(4, nodes=2, **changes)


# --- a lost node ----------------------------------------------------------------------------------------------------


def test_the_ranks_of_a_lost_node_wait_for_it_and_are_filled_when_it_is_back() -> None:
    job = two_nodes().trained(4)
    lost = [job.of(2), job.of(3)]
    lose(job, "n1")
    assert {halt.worker for halt in job.all(orders.HaltGeneration)} == {job.of(0), job.of(1)}
    assert {gone.worker for gone in job.all(WorkerGone)} == set(lost)
    survivors_halt(job, (0, 1), 5)
    assert not [spawn for spawn in job.all(orders.SpawnWorker) if spawn.role is Role.JOINER], (
        "not on a node that is away"
    )
    back(job, "n1")
    joiners = [spawn for spawn in job.all(orders.SpawnWorker) if spawn.role is Role.JOINER]
    assert [(spawn.node, spawn.rank, spawn.local_rank) for spawn in joiners] == [("n1", 2, 0), ("n1", 3, 1)]
    assert not {spawn.worker for spawn in joiners} & set(lost), "ids are never used again"
    job.ready(job.of(2))
    job.ready(job.of(3))
    made = form(job)
    assert (made.step, made.holders, made.stores) == (5, [0, 1], ["store0", "new store"])
    job.joined().stepped(5)
    closed = job.last(IncidentClosed)
    assert (closed.kind, closed.ranks, closed.rung, closed.steps_lost) == ("node", [2, 3], "node", 0)
    assert closed.cause == "n1 was lost (its connection ended)"


def test_a_node_that_was_silent_was_lost_when_it_was_last_heard_of() -> None:
    job = two_nodes().trained(4)
    job.tell(facts.NodeLost(NodeId("n1"), "it answered nothing for 10 s", silent=10.0))
    survivors_halt(job, (0, 1), 5)
    back(job, "n1")
    job.ready(job.of(2))
    job.ready(job.of(3))
    form(job)
    job.joined().stepped(5)
    assert job.last(IncidentClosed).detect == pytest.approx(10.0)


def test_the_first_node_is_no_more_than_any_other() -> None:
    job = two_nodes().trained(4)
    lose(job, "n0")
    survivors_halt(job, (2, 3), 5)
    back(job, "n0", store="new")
    job.ready(job.of(0))
    job.ready(job.of(1))
    assert (form(job).holders, form(job).stores) == ([2, 3], ["new", "store1"])


def test_a_symptom_and_the_lost_node_that_explains_it_are_one_fault() -> None:
    job = two_nodes(max_faults=1).trained(4)
    job.faulted(0, 5, kind=FaultKind.COLLECTIVE)
    lose(job, "n1")
    assert not job.all(EndJob)
    assert len(job.all(IncidentOpened)) == 1


def test_what_the_workers_of_a_lost_node_still_say_is_not_heard() -> None:
    job = two_nodes().trained(4)
    late = job.of(2)
    lose(job, "n1")
    survivors_halt(job, (0, 1), 5)
    said = len(job.said)
    job.tell(facts.WorkerHalted(late, job.machine.generation, StepNo(6)))
    job.exited(late)
    job.ready(late, 6)
    assert len(job.said) == said


def test_a_node_that_stays_away_ends_the_job_to_be_run_again() -> None:
    job = two_nodes(node_deadline=60.0).trained(4)
    lose(job, "n1")
    survivors_halt(job, (0, 1), 5)
    job.tell(facts.TimeAdvanced(), after=59.0)
    assert not job.all(EndJob)
    job.wait()
    assert job.end.code == 75
    assert "n1 was lost and did not come back within 60 s" in job.end.diagnosis
    assert "--node-timeout" in job.end.diagnosis


def test_both_nodes_may_be_away_in_turn() -> None:
    job = two_nodes().trained(4)
    lose(job, "n1")
    back(job, "n1")
    lose(job, "n1")
    back(job, "n1", store="newest")
    survivors_halt(job, (0, 1), 5)
    job.ready(job.of(2))
    job.ready(job.of(3))
    assert form(job).stores == ["store0", "newest"]


def test_a_worker_that_dies_while_a_node_is_away_is_replaced_at_once() -> None:
    job = two_nodes(standbys=1).trained(4)
    standby = next(w.worker for w in job.machine.roster.standbys(NodeId("n0")))
    lose(job, "n1")
    job.exited(job.of(0))
    assert job.of(0) == standby
    job.halted(1, 5)
    assert not [spawn for spawn in job.all(orders.SpawnWorker)[6:] if spawn.node == "n1"]


def test_a_node_lost_before_the_first_step_has_all_workers_started_again_when_it_is_back() -> None:
    job = two_nodes()
    workers = [job.of(rank) for rank in job.ranks]
    lose(job, "n1")
    for worker in workers[:2]:
        job.exited(worker)
    assert len(job.all(orders.SpawnWorker)) == 4, "not before the node is back"
    job.tell(facts.TimeAdvanced(), after=30.0)
    assert not job.all(EndJob)
    back(job, "n1")
    assert [spawn.role for spawn in job.all(orders.SpawnWorker)[4:]] == [Role.RANK] * 4


def test_all_nodes_lost_ends_the_job_where_nothing_is_on_disk() -> None:
    job = two_nodes().trained(4)
    lose(job, "n1")
    assert not job.all(EndJob)
    lose(job, "n0")
    assert job.end.code == 1
    assert "no durable checkpoint" in job.end.diagnosis


def test_all_nodes_lost_start_again_from_the_durable_checkpoint() -> None:
    job = two_nodes(durable=True).trained(4)
    lose(job, "n1")
    lose(job, "n0")
    back(job, "n0")
    assert len(job.all(orders.SpawnWorker)) == 4, "not before all nodes are back"
    back(job, "n1")
    again = job.all(orders.SpawnWorker)[4:]
    assert [(spawn.role, spawn.resume) for spawn in again] == [(Role.RANK, True)] * 4


def test_a_node_that_is_here_cannot_join_again() -> None:
    job = two_nodes().trained(4)
    said = len(job.said)
    back(job, "n1")
    assert len(job.said) == said


def test_a_node_lost_after_the_last_step_is_named() -> None:
    job = two_nodes().trained(4)
    for rank in job.ranks:
        job.finished(rank, 5)
    lose(job, "n1")
    assert job.end.code == 75
    assert "in the code after the last step; 5 steps had been committed" in job.end.diagnosis


def test_a_node_whose_workers_have_all_ended_well_is_not_missed() -> None:
    job = two_nodes().trained(4)
    for rank in job.ranks:
        job.finished(rank, 5)
    for rank in (2, 3):
        job.exited(job.of(rank), 0)
    lose(job, "n1")
    for rank in (0, 1):
        job.exited(job.of(rank), 0)
    assert (job.end.code, job.end.diagnosis) == (0, "")


def test_people_are_told_that_a_node_is_waited_for_and_that_it_is_back() -> None:
    job = two_nodes(node_deadline=90.0).trained(4)
    lose(job, "n1")
    back(job, "n1")
    told = [note.text for note in job.all(Noted)]
    assert "n1 was lost; ranks 2, 3 wait for it to come back, for 90 s at most" in told
    assert "n1 is back, on another host" in told
    assert [(node.node, node.away) for node in job.machine.snapshot().nodes] == [("n0", False), ("n1", False)]


def test_a_lost_nodes_standbys_are_replaced_when_it_is_back() -> None:
    job = two_nodes(standbys=1).trained(4)
    lose(job, "n1")
    survivors_halt(job, (0, 1), 5)
    back(job, "n1")
    job.ready(job.of(2))
    job.ready(job.of(3))
    job.joined().stepped(5)
    assert len(job.machine.roster.standbys(NodeId("n1"))) == 1


def test_a_generation_is_not_formed_without_a_lost_node() -> None:
    job = two_nodes().trained(4)
    lose(job, "n1")
    formed = len(job.all(orders.FormGeneration))
    survivors_halt(job, (0, 1), 5)
    job.tell(facts.TimeAdvanced(), after=100.0)
    assert len(job.all(orders.FormGeneration)) == formed


# --- who keeps copies for whom --------------------------------------------------------------------------------------


def test_every_node_is_told_its_buddy_and_again_when_one_came_back() -> None:
    job = two_nodes(buddy_every=2)
    placed = {order.node: order.buddy for order in job.all(PlaceCopies)}
    assert placed == {"n0": "n1", "n1": "n0"}
    job.trained(4)
    lose(job, "n1")
    back(job, "n1", copy_endpoint="new vault")
    assert [(order.node, order.buddy, order.endpoint) for order in job.all(PlaceCopies)[2:]] == [
        ("n0", "n1", "new vault"),
        ("n1", "n0", ""),
    ]


def test_without_copies_nobody_is_told_a_buddy() -> None:
    assert not two_nodes().trained(4).all(PlaceCopies)


@pytest.mark.parametrize("domains", ["aabb", "abab", "aabbcc", "abcabc", "aaabbb", "", "a_b_", "aabbbccc"])
def test_buddies_are_in_another_domain_and_each_node_keeps_the_copies_of_one(domains: str) -> None:
    places = [NodeDomain(NodeId(f"n{at}"), "" if each == "_" else each) for at, each in enumerate(domains)]
    found = buddies(places)
    domain = {place.node: place.domain or place.node for place in places}
    assert sorted(str(buddy) for buddy in found.values()) == sorted(found)
    assert all(buddy is not None and domain[buddy] != domain[node] for node, buddy in found.items())


def test_with_no_other_domain_the_buddy_is_another_node_and_alone_there_is_none() -> None:
    same = [NodeDomain(NodeId(f"n{at}"), "rack") for at in range(3)]
    assert all(buddy not in (None, node) for node, buddy in buddies(same).items())
    assert buddies([NodeDomain(NodeId("n0"))]) == {NodeId("n0"): None}
    ring = buddies([NodeDomain(NodeId(f"n{at}")) for at in range(12)])
    assert ring[NodeId("n2")] == "n3"
    assert ring[NodeId("n11")] == "n0"


def test_holders_of_one_part_that_fail_together_are_told_once() -> None:
    job = Job(4, nodes=2, durable=True)
    for rank in job.ranks:  # the script has dealt its parts out by nodes
        job.ready(job.of(rank), 0, holding="ab"[rank // 2], sharded=True)
    told = [note.text for note in job.all(Noted) if "hold the same part" in note.text]
    assert told == [
        "ranks 0 and 1 hold the same part of the state and are all on node n0: if it is lost, this part is too "
        "(--buddy-every K keeps copies elsewhere)"
    ]
    for rank in job.ranks:
        job.resumed(rank)
    mend(job, 1, 3)
    assert [note.text for note in job.all(Noted) if "hold the same part" in note.text] == told


def test_nothing_is_told_where_each_part_has_holders_that_do_not_fail_together() -> None:
    job = Job(4, nodes=2, durable=True)
    for rank in job.ranks:
        job.ready(job.of(rank), 0, holding="ab"[rank % 2], sharded=True)
    assert not [note for note in job.all(Noted) if "hold the same part" in note.text]
