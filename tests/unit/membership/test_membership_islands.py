"""A rank that goes to another node alone would speak over the network with its replica: all of its node follow it."""

from typing import Any

import pytest
from tests.unit.membership.elastic_job import candidates, comes, planned, stop
from tests.unit.membership.membership_job import Job

from regrow.core.exit_codes import DEVICE_FAILED
from regrow.core.ids import NO_STATE
from regrow.core.messages import orders
from regrow.core.records import IncidentClosed, Noted


def pairs(**changes: Any) -> Job:
    """Ranks 0 and 1, a replica, on n0, 2 and 3 on n1."""
    fields: dict[str, Any] = {"unit": 2, "slots": 2, "nproc": 2, **changes}
    return Job(4, nodes=2, **fields).trained(4)


def break_device(job: Job, rank: int, step: int) -> None:
    """The rank's device fails, twice in the step, so that it is filled elsewhere; all stand and train again."""
    for _ in range(2):
        job.exited(job.of(rank), DEVICE_FAILED)
        for other in job.ranks:
            if other != rank:
                job.halted(other, step)
        job.ready(job.of(rank))
        job.joined()
    job.stepped(step)


def homes(job: Job) -> list[str]:
    roster = job.machine.roster
    return [roster.workers[roster.places[rank]].node for rank in roster.places]


def notes(job: Job) -> str:
    return "\n".join(each.text for each in job.all(Noted))


@pytest.mark.parametrize("comes_first", ["n2", "n3"])
def test_all_ranks_of_the_node_follow_to_one_that_has_room_for_them(comes_first: str) -> None:
    job = pairs()
    for node in sorted(["n2", "n3"], reverse=comes_first == "n3"):
        comes(job, node, slots=1 if node == "n2" else 2)
    break_device(job, 1, 5)
    assert homes(job) == ["n0", "n3", "n1", "n1"], "at once, as its replica waits"
    (worker,) = candidates(job)
    job.ready(worker, NO_STATE)
    at = planned(job)
    assert not job.all(orders.ReleaseWorker)
    stop(job)
    job.joined().stepped(at)
    assert homes(job) == ["n3", "n3", "n1", "n1"]
    closed = job.last(IncidentClosed)
    assert (closed.kind, closed.faults, closed.steps_lost) == ("move", 0, 0)
    assert "rank 0 of n0 follows rank 1 of their replica to n3" in notes(job)
    assert not candidates(job)


def test_without_such_a_node_the_rank_goes_alone_and_that_is_said() -> None:
    job = pairs()
    comes(job, "n2")
    break_device(job, 1, 5)
    assert homes(job) == ["n0", "n2", "n1", "n1"]
    assert not candidates(job)
    said = "rank 1 went to n2, and speaks over the network with those of its replica on n0: rank 0 cannot move: n2 has"
    assert notes(job).count(said) == 1


def test_a_replica_of_one_rank_is_never_alone() -> None:
    job = pairs(unit=1)
    comes(job, "n2", slots=2)
    break_device(job, 1, 5)
    assert homes(job) == ["n0", "n2", "n1", "n1"]
    assert not candidates(job) and "replica" not in notes(job)


def test_those_whose_state_nobody_else_has_stay() -> None:
    job = Job(4, nodes=2, unit=2, slots=2, nproc=2, buddy_every=1)
    for rank in job.ranks:
        job.ready(job.of(rank), 0, holding=f"part {rank if rank != 1 else 3}", sharded=True)
    job.joined().stepped(4)
    comes(job, "n2", slots=2)
    for _ in range(2):
        job.exited(job.of(1), DEVICE_FAILED)
        for other in (0, 2, 3):
            job.halted(other, 5)
        job.ready(job.of(1), holding="part 3", sharded=True)
        job.joined()
    job.stepped(5)
    assert homes(job) == ["n0", "n2", "n1", "n1"]
    assert "no rank that would stay has the same part of the state" in notes(job)
