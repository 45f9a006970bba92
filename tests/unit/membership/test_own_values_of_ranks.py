"""Values of each rank's own go to whoever takes this rank, never to another that has its number later."""

from typing import Any

from tests.unit.membership.elastic_job import candidates, elastic, lose, planned, scale
from tests.unit.membership.membership_job import Job
from tests.unit.membership.test_membership_moving import move, spared

from regrow.core.ids import NO_STATE, NodeId, Rank, StepNo, WorkerId
from regrow.core.messages import facts, orders
from regrow.core.messages.replicas import OwnValues, ReplicasDiffer
from regrow.core.records import WorldChanged


def own(step: int, worker: WorkerId) -> list[OwnValues]:
    """A worker's own values at a step, as its agent finds them."""
    return [OwnValues(StepNo(step), f"of {worker}".encode())]


def stop(job: Job, at: int) -> None:
    """All halt there, each with values of its own."""
    for rank in job.ranks:
        job.tell(facts.WorkerHalted(job.of(rank), job.machine.generation, StepNo(at), left=own(at, job.of(rank))))


def exits(job: Job, worker: WorkerId, step: int, code: int = -9) -> None:
    job.tell(facts.WorkerExited(worker, code, job.now, left=own(step, worker)))


def sent(job: Job) -> dict[int, Any]:
    """Own values that the last order to form sent to each rank."""
    generation = job.machine.generation
    return {each.rank: each.own for each in job.all(orders.FormGeneration) if each.generation == generation}


def test_who_had_a_rank_before_it_moved_and_ends_late_does_not_replace_what_the_rank_has_left_since() -> None:
    job = spared()
    before = job.of(3)
    assert move(job, "n1").accepted
    at = planned(job)
    stop(job, at)
    job.joined().stepped(at)
    moved = job.of(3)
    exits(job, moved, at + 1)
    exits(job, before, at, 0)
    for rank in (0, 1, 2):
        job.halted(rank, at + 1)
    job.ready(job.of(3), NO_STATE)
    assert sent(job)[3] == own(at + 1, moved)[0]


def test_who_left_with_its_replica_and_ends_late_leaves_nothing_to_the_next_with_its_number() -> None:
    job = elastic(3, nodes=3, slots=2, standbys=0)
    before = [job.of(rank) for rank in range(3)]
    job.tell(facts.NodeDraining(NodeId("n0"), 60.0, "its time is over"))
    at = planned(job)
    stop(job, at)
    assert [job.of(rank) for rank in range(2)] == before[1:], "ranks are renumbered"
    job.joined()
    lose(job, "n1")
    exits(job, before[0], at, 0)
    job.halted(1, at)
    job.ready(job.of(0), NO_STATE)
    assert sent(job)[0] is None


def test_ranks_that_have_other_numbers_since_get_nothing_by_them_though_the_size_is_as_it_was() -> None:
    """A node is lost while the larger world forms, so the next has as many replicas as the one before, but others."""
    job = elastic(3, nodes=4, slots=1, nproc=1, spares=1, standbys=0)
    assert scale(job, 4).accepted
    for worker in candidates(job):
        job.ready(worker, NO_STATE)
    stop(job, planned(job))
    assert job.machine.world == 4
    newcomer, step = job.of(3), job.machine.step
    lose(job, "n0")
    for rank in (1, 2):
        job.tell(facts.WorkerHalted(job.of(rank), job.machine.generation, StepNo(step), left=own(step, job.of(rank))))
    job.halted(3, NO_STATE)
    assert job.machine.world == 3 and job.of(2) == newcomer
    assert not job.all(WorldChanged)[1:] or job.last(WorldChanged).after == 3
    assert sent(job)[2] is None, "rank 2 of the former world is rank 1 now"


def test_steps_that_are_undone_because_replicas_differ_leave_nothing_for_those_that_replace_them() -> None:
    job = Job(3).trained(7)
    for rank in job.ranks:
        differ = ReplicasDiffer(job.of(rank), job.machine.generation, StepNo(8), [Rank(1)], [], ["model.weight"])
        job.tell(differ)
    for rank in job.ranks:
        left = [*own(7, job.of(rank)), *own(8, job.of(rank))]
        halted = facts.WorkerHalted(job.of(rank), job.machine.generation, StepNo(8), verified=StepNo(6), left=left)
        job.tell(halted)
    assert job.last(orders.FormGeneration).rewind
    job.joined().stepped(6)
    job.exited(job.of(2))
    job.halted(0, 7)
    job.halted(1, 7)
    job.ready(job.of(2))
    assert job.last(orders.FormGeneration).step == 7 and sent(job)[2] is None
