"""Spare nodes: they hold no ranks, keep warm workers, and take the ranks of a lost node at once."""

from typing import Any

import pytest
from tests.unit.membership.membership_job import Job, form

from regrow.core.errors import UsageError
from regrow.core.ids import NodeId
from regrow.core.messages import facts, orders
from regrow.core.messages.observations import WorkerAlive
from regrow.core.messages.vocabulary import Role
from regrow.core.records import IncidentClosed, Noted
from regrow.launch.elastic import elasticity, span


def two_and_a_spare(**changes: Any) -> Job:
    """Ranks 0 and 1 on n0, ranks 2 and 3 on n1, none on n2."""
    return Job(6, nodes=3, spares=1, **changes).trained(4)


def standbys_of(job: Job, node: str) -> list[orders.SpawnWorker]:
    return [spawn for spawn in job.all(orders.SpawnWorker) if spawn.role is Role.STANDBY and spawn.node == node]


def test_the_world_is_on_the_other_nodes_and_the_spare_keeps_a_warm_worker_for_each_rank_of_one() -> None:
    job = two_and_a_spare()
    ranks = [(spawn.node, spawn.rank) for spawn in job.all(orders.SpawnWorker) if spawn.role is Role.RANK]
    assert ranks == [("n0", 0), ("n0", 1), ("n1", 2), ("n1", 3)]
    assert len(standbys_of(job, "n2")) == 2
    assert not standbys_of(job, "n0") and not standbys_of(job, "n1"), "no standbys were asked for"


@pytest.mark.parametrize(("lost", "left"), [("n0", (2, 3)), ("n1", (0, 1))])
def test_its_workers_take_the_ranks_of_a_lost_node_which_is_the_spare_when_it_is_back(
    lost: str, left: tuple[int, int]
) -> None:
    job = two_and_a_spare()
    warm = {spawn.worker for spawn in standbys_of(job, "n2")}
    for worker in warm:
        job.ready(worker)
    gone = sorted({0, 1, 2, 3} - set(left))
    job.tell(facts.NodeLost(NodeId(lost), "its connection ended"))
    for rank in left:
        job.halted(rank, 5)
    assert {job.of(rank) for rank in gone} == warm
    for worker in warm:
        job.tell(WorkerAlive(worker))
    assert form(job).step == 5
    job.joined().stepped(5)
    closed = job.last(IncidentClosed)
    assert (closed.kind, closed.ranks, closed.rung, closed.steps_lost) == ("node", gone, "node", 0)
    assert len(standbys_of(job, "n2")) == 2, "it is no spare any more"
    job.tell(facts.NodeJoined(NodeId(lost), "another host", 2, "new store"))
    job.stepped(6)
    assert len(standbys_of(job, lost)) == 2
    assert {job.machine.roster.home(rank)[0].node for rank in job.machine.roster.places} == {"n0", "n1", "n2"} - {lost}


@pytest.mark.parametrize(("nodes", "notes"), [(2, 1), (3, 0)])
def test_a_spare_that_gets_ranks_since_one_node_would_hold_all_of_them_is_noted(nodes: int, notes: int) -> None:
    job = Job(2 * nodes, nodes=nodes, spares=1)
    said = [note.text for note in job.all(Noted)]
    assert said == notes * [
        "--spares 1 is not kept: the ranks are spread over 2 nodes, because on fewer nodes one failure could take all "
        "copies of a part of the state (start the job on one node more)"
    ]
    assert {spawn.node for spawn in job.all(orders.SpawnWorker) if spawn.role is Role.RANK} == {"n0", "n1"}


def test_the_spare_that_is_lost_itself_is_done_without() -> None:
    job = two_and_a_spare()
    job.tell(facts.NodeLost(NodeId("n2"), "its connection ended"))
    job.stepped(5)
    assert not job.machine.incident
    job.tell(facts.NodeLost(NodeId("n1"), "its connection ended"))
    for rank in (0, 1):
        job.halted(rank, 6)
    assert not [spawn for spawn in job.all(orders.SpawnWorker) if spawn.role is Role.JOINER], "there is no room"
    job.tell(facts.NodeJoined(NodeId("n2"), "another host", 2, "new store"))
    joiners = [(spawn.node, spawn.rank) for spawn in job.all(orders.SpawnWorker) if spawn.role is Role.JOINER]
    assert joiners == [("n2", 2), ("n2", 3)], "whoever is back first takes them"


def test_spares_are_counted_in_the_nodes_and_leave_at_least_one() -> None:
    fixed = elasticity(span("--nnodes", "3", "nodes"), 2, spares=1, replicas="", unit=2, sizes="")
    assert (fixed.min_replicas, fixed.most_nodes, fixed.spares) == (None, 3, 1)
    grows = elasticity(span("--nnodes", "2:4", "nodes"), 2, spares=1, replicas="", unit=2, sizes="")
    assert (grows.min_replicas, grows.max_replicas, grows.most_nodes) == (1, 3, 4)
    with pytest.raises(UsageError, match="--spares 3 leaves none of the 3 nodes that the job starts on"):
        elasticity(span("--nnodes", "3", "nodes"), 2, spares=3, replicas="", unit=1, sizes="")
