"""Stop of all for another world, and the blame while newcomers come, fact by fact."""

import pytest
from tests.unit.membership.elastic_job import (
    candidates,
    comes,
    drain,
    elastic,
    phase,
    planned,
    scale,
    shrunk,
    stop,
    two_nodes,
)
from tests.unit.membership.membership_job import Job, form

from regrow.core.ids import NO_STATE, StepNo
from regrow.core.messages import facts, orders
from regrow.core.records import Noted, ScaleRefused
from regrow.train.worker.recovery import HYDRATE_S
from regrow.train.worker.supervised import FORM_S


def switching(**changes: object) -> Job:
    """Two ranks were told to stop before a step, for a third to come in."""
    job = elastic(**changes)  # type: ignore[arg-type]
    scale(job, 3)
    job.ready(candidates(job)[0], NO_STATE)
    return job


def stand(job: Job, rank: int, step: int, *, after: float = 0.01) -> None:
    """A rank blocks in its step; the others wait for it."""
    job.now += after
    job.seen(*[job.sight(each, step, waits=each != rank) for each in job.ranks])


# --- who waits for newcomers is not to blame -------------------------------------------------------------------------


def test_who_stands_in_a_collective_while_a_newcomer_receives_its_state_does_not_hang() -> None:
    job = switching()
    stop(job)
    job.resumed(0)
    job.resumed(1)
    at = job.machine.step
    for rank in (0, 1):
        stand(job, rank, at)
    assert not job.all(orders.FenceWorker)
    job.resumed(2)
    stand(job, 2, at)
    assert not job.all(orders.FenceWorker), "the newcomer has only just begun its step"
    hung = job.of(2)
    stand(job, 2, at, after=91.0)
    assert [order.worker for order in job.all(orders.FenceWorker)] == [hung], "what is seen after that is true"


def test_who_is_stopped_while_a_newcomer_receives_its_state_is_to_blame() -> None:
    job = switching()
    stop(job)
    job.resumed(0)
    stopped = job.of(0)
    job.now += 91.0
    job.seen(job.sight(0, job.machine.step, stopped=True))
    assert [order.worker for order in job.all(orders.FenceWorker)] == [stopped]


def test_a_newcomer_may_take_ten_minutes_to_receive_its_state() -> None:
    assert elastic().machine.spec.form_deadline > FORM_S + HYDRATE_S
    job = switching()
    stop(job)
    job.resumed(0)
    job.resumed(1)
    newcomer = job.of(2)
    job.tell(facts.TimeAdvanced(), after=600.0)
    assert not job.all(orders.FenceWorker)
    job.wait()
    assert [order.worker for order in job.all(orders.FenceWorker)] == [newcomer]


# --- the agreed step -------------------------------------------------------------------------------------------------


def test_the_agreed_step_is_near_where_the_time_goes_by_between_steps() -> None:
    job = elastic()
    for step in range(5, 9):
        for rank in job.ranks:
            at = 1000.0 * rank + step / 2
            job.tell(facts.WorkerCommitted(job.of(rank), job.machine.generation, StepNo(step), at, 0.0005), after=0.25)
    scale(job, 1)
    assert planned(job) <= 9 + 3


def test_a_change_that_nobody_hurries_waits_while_the_script_evaluates() -> None:
    job = switching()
    at, begun = planned(job), job.now
    while job.now < begun + 60.0:
        job.wait()
        assert {(halt.worker, halt.at) for halt in job.all(orders.HaltGeneration)} == {(job.of(0), at), (job.of(1), at)}
    assert len(job.all(orders.HaltGeneration)) <= 20, "and says so now and then"
    stop(job, at=at)
    assert (len(form(job).members), form(job).step) == (3, at)


def test_a_change_that_nobody_hurries_does_not_wait_for_ever() -> None:
    job = switching()
    begun = job.now
    while job.last(orders.HaltGeneration).at is not None:
        job.wait()
    assert job.now - begun == pytest.approx(300.0, abs=1.0)


def test_who_gives_a_node_back_does_not_wait_for_long() -> None:
    job = two_nodes()
    drain(job, "n1")
    begun = job.now
    job.wait()
    assert job.last(orders.HaltGeneration).at is None
    assert job.now - begun < 5.0


def test_a_node_that_is_given_back_hurries_a_change_that_was_begun_without_need() -> None:
    job = two_nodes()
    scale(job, 3)
    for _ in range(4):
        job.wait()
    assert job.last(orders.HaltGeneration).at is not None
    begun = job.now
    drain(job, "n0", grace=10.0)
    job.wait()
    assert job.last(orders.HaltGeneration).at is None
    assert job.now - begun < 5.0


@pytest.mark.parametrize("grace", [2.5, 3.0, 5.0, 60.0])
def test_all_are_halted_in_time_for_who_must_leave(grace: float) -> None:
    job = two_nodes()
    begun = job.now
    drain(job, "n1", grace=grace)
    while job.last(orders.HaltGeneration).at is not None:
        job.wait()
    assert job.now <= begun + grace - 1.4


def test_a_step_planned_anew_is_not_after_the_time_is_over() -> None:
    job = two_nodes()
    drain(job, "n1", grace=2.4)
    at = planned(job)
    assert at == 5 + 3
    job.tell(facts.HaltMissed(job.of(0), job.machine.generation, StepNo(at), StepNo(at)), after=0.5)
    assert job.last(orders.HaltGeneration).at is None, "six steps more are 0.6 s, and 0.4 s are left"


# --- changes that come to nothing ------------------------------------------------------------------------------------


def test_a_change_that_was_not_carried_out_does_not_keep_the_next_waiting() -> None:
    job = two_nodes(change_pause=100.0)
    scale(job, 2)
    drain(job, "n0")
    while job.last(orders.HaltGeneration).at is not None:
        job.wait()
    for rank in job.ranks:
        job.halted(rank, 6 if rank == 1 else 5)
    assert len(form(job).members) == 4, "who would go, since its node does, alone has the newest state"
    job.joined().stepped(6)
    stop(job)
    assert [member.node for member in form(job).members] == ["n1", "n1"]
    job.joined().stepped(job.machine.step)
    comes(job, "n2", 2)
    assert len(candidates(job)) == 2, "nothing was changed without need so far"


def test_a_change_that_comes_after_the_last_step_is_said_to_come_to_nothing() -> None:
    job = switching()
    for rank in job.ranks:
        job.finished(rank, planned(job) - 1)
    assert len(job.all(orders.ReleaseWorker)) == 2
    assert "2 replicas: 3 replicas were wanted (an operator asks for it)" in job.last(Noted).text


def test_nothing_is_said_where_the_world_is_as_it_was_wanted() -> None:
    job = shrunk(elastic(), 1)
    job.finished(0, job.machine.step)
    assert len(job.all(orders.ReleaseWorker)) == 2
    assert not job.all(Noted)


# --- scripts that fit one world only ---------------------------------------------------------------------------------


def fixed(job: Job, worker: str, why: str = "a group of ranks 0 and 1") -> None:
    job.tell(facts.WorkerReady(worker, NO_STATE, "address", "same", fixed=why))  # type: ignore[arg-type]


def test_a_newcomer_whose_script_fits_one_world_only_is_done_without() -> None:
    job = elastic()
    scale(job, 4)
    first, second = candidates(job)
    fixed(job, first)
    refused = job.last(ScaleRefused)
    assert (refused.replicas, refused.reason) == (
        4,
        "the world cannot grow while the job trains: a group of ranks 0 and 1",
    )
    assert {order.worker for order in job.all(orders.FenceWorker)} == {first, second}
    assert (phase(job), candidates(job), job.machine.snapshot().wanted) == ("training", [], 2)
    assert scale(job, 3).reason == refused.reason
    assert not job.all(orders.HaltGeneration)
    assert scale(job, 1).accepted, "a smaller world is another matter"
    stop(job)
    job.joined().stepped(job.machine.step)
    assert scale(job, 2).accepted, "and so is the one that there was"


def test_a_standby_whose_script_fits_one_world_only_stays_a_standby() -> None:
    job = elastic(standbys=1)
    standby = job.standby()
    fixed(job, standby)
    scale(job, 3)
    assert candidates(job) != [standby]
    fixed(job, candidates(job)[0])
    assert job.standby() == standby
    job.exited(job.of(1))
    assert job.of(1) == standby, "a lost rank it can fill"


def test_a_world_of_one_size_may_still_move() -> None:
    job = Job(2, nodes=2, min_replicas=1, max_replicas=2, slots=2)
    for rank in job.ranks:
        job.tell(facts.WorkerReady(job.of(rank), StepNo(0), "address", "same", fixed="a group of ranks 0 and 1"))
    job.joined().stepped(0)
    drain(job, "n1")
    newcomer = candidates(job)[0]
    fixed(job, newcomer)
    stop(job)
    assert [member.worker for member in form(job).members] == [job.of(0), newcomer]


# --- the end ---------------------------------------------------------------------------------------------------------


def test_nothing_is_ordered_after_the_end_though_a_node_is_given_back() -> None:
    job = elastic(1, slots=1, max_replicas=1)
    comes(job, "n1", 1)
    drain(job, "n0")
    lost = job.of(0)
    for worker in candidates(job):
        job.exited(worker)
    job.exited(lost)
    job.ready(job.of(0), NO_STATE)
    assert job.end.code == 1
    assert job.said[-1] == job.end
