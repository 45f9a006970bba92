"""Behind the last step: faults are mended until all scripts have come to their end, and nobody is kept for ever."""

from tests.unit.membership.membership_job import OOM, Job, form

from regrow.core.ids import StepNo
from regrow.core.messages import orders
from regrow.core.messages.facts import TimeAdvanced, WorkerFailed, WorkerFinished, WorkerHalted
from regrow.core.phase import Phase
from regrow.core.records import IncidentClosed
from regrow.membership.machine import EndJob
from regrow.membership.states import Closing, Mending, Releasing

LAST = StepNo(5)


def stepped(job: Job, rank: int) -> None:
    """The rank has run its last step, and its script goes on."""
    job.tell(WorkerFinished(job.of(rank), job.machine.generation, LAST, goes_on=True))


def halted(job: Job, rank: int, restart_index: int) -> None:
    job.tell(WorkerHalted(job.of(rank), job.machine.generation, LAST, restart_index=restart_index))


def closing(world: int = 2, **settings: object) -> Job:
    """A job whose ranks have all run their last step."""
    job = Job(world, **settings).trained(4)  # type: ignore[arg-type]
    for rank in job.ranks:
        stepped(job, rank)
    assert isinstance(job.machine.state, Closing)
    return job


def released_from_loop(job: Job) -> list[orders.ReleaseWorker]:
    return [order for order in job.all(orders.ReleaseWorker) if order.goes_on]


def released(job: Job) -> list[orders.ReleaseWorker]:
    return [order for order in job.all(orders.ReleaseWorker) if not order.goes_on]


def test_all_leave_their_loops_together_and_end_together() -> None:
    job = Job(2).trained(4)
    stepped(job, 0)
    assert not job.all(orders.ReleaseWorker), "the other may still need its state"
    stepped(job, 1)
    assert [order.worker for order in released_from_loop(job)] == [job.of(0), job.of(1)]
    job.finished(1, LAST)
    assert not released(job), "the other may still need it"
    job.finished(0, LAST)
    assert {order.worker for order in released(job)} == {job.of(0), job.of(1)}
    job.exited(job.of(0), 0)
    job.exited(job.of(1), 0)
    assert (job.end.code, job.end.diagnosis) == (0, "")


def test_a_worker_killed_behind_the_last_step_is_replaced_and_comes_in_behind_it() -> None:
    job = closing(3)
    job.finished(2, LAST)
    job.exited(job.of(1))
    assert {order.worker for order in job.all(orders.HaltGeneration)} == {job.of(0), job.of(2)}
    halted(job, 0, restart_index=2)
    halted(job, 2, restart_index=3)
    job.ready(job.of(1))
    assert (form(job).step, form(job).holders, form(job).over, form(job).restart_index) == (LAST, [0, 2], True, 1)
    job.joined()
    assert isinstance(job.machine.state, Closing)
    assert len(job.all(IncidentClosed)) == 1, "what the script still does is no part of the incident"
    for rank in job.ranks:
        assert not released(job)
        job.finished(rank, LAST)
    assert len(released(job)) == 3


def test_a_worker_that_has_ended_well_is_no_fault_and_is_run_again_only_for_another() -> None:
    job = closing(3)
    job.exited(job.of(1), 0)
    assert isinstance(job.machine.state, Closing)
    job.exited(job.of(2))
    assert isinstance(job.machine.state, Mending)
    halted(job, 0, restart_index=1)
    job.ready(job.of(1))
    job.ready(job.of(2))
    assert form(job).holders == [0]


def test_the_rest_is_released_where_one_has_ended_without_a_word() -> None:
    job = closing()
    job.exited(job.of(1), 0)
    job.finished(0, LAST)
    assert [order.worker for order in released(job)] == [job.of(0)]
    job.exited(job.of(0), 0)
    assert job.end.code == 0


def test_a_code_that_the_script_has_chosen_ends_the_job() -> None:
    job = closing()
    job.exited(job.of(1), 3)
    assert job.end.code == 1
    assert "rank 1 exited with code 3 in the code after its last step" in job.end.diagnosis


def test_an_error_of_its_own_is_told_whole_and_one_that_another_has_caused_is_mended() -> None:
    job = closing()
    job.tell(WorkerFailed(job.of(1), OOM, LAST, own=False))
    job.exited(job.of(1), 1)
    assert not job.all(EndJob)
    job = closing()
    job.tell(WorkerFailed(job.of(1), OOM, LAST, own=True))
    assert job.end.code == 1
    assert OOM.traceback in job.end.diagnosis


def test_the_word_to_go_on_is_repeated_and_who_has_come_to_the_end_is_not_kept_for_ever() -> None:
    job = closing(build_deadline=90.0)
    assert [order for order in job.wait() if isinstance(order, orders.ReleaseWorker) and order.goes_on]
    job.finished(1, LAST)
    for _ in range(20):
        if isinstance(job.machine.state, Closing):
            job.wait()
    assert isinstance(job.machine.state, Releasing)
    assert {order.worker for order in released(job)} == {job.of(0), job.of(1)}
    assert not job.all(orders.FenceWorker), "one that takes its time is not ended"
    job.exited(job.of(1), 0)
    job.tell(TimeAdvanced(), after=80_000.0)
    assert not job.all(EndJob), "an upload may take hours"
    job.tell(TimeAdvanced(), after=7_000.0)
    assert job.end.code == 75, "one that stays for ever does not keep the job"


def test_what_an_agent_repeats_of_the_last_step_is_not_the_scripts_end() -> None:
    job = closing()
    stepped(job, 0)
    stepped(job, 1)
    assert isinstance(job.machine.state, Closing)
    assert not released(job)


def test_where_nobody_has_the_last_state_any_more_the_job_ends_as_it_did() -> None:
    job = closing(1)
    job.exited(job.of(0))
    assert job.end.code == 1
    assert (
        "in the code after its last step; all ranks had left the loop, and 5 steps had been committed"
        in job.end.diagnosis
    )
    shards = closing(2)
    for rank in shards.ranks:
        shards.machine.roster.workers[shards.of(rank)].holding = f"part {rank}"
    shards.exited(shards.of(0))
    halted(shards, 1, restart_index=1)
    shards.ready(shards.of(0), holding="part 0")
    assert shards.end.code == 1


def test_a_script_of_which_one_rank_does_not_go_on_is_let_go_at_once() -> None:
    job = Job(2).trained(4)
    stepped(job, 0)
    job.finished(1, LAST)
    assert isinstance(job.machine.state, Releasing)
    assert len(released(job)) == 2


def test_one_that_hangs_as_it_comes_in_is_replaced_though_the_others_have_finished() -> None:
    job = closing(3)
    job.exited(job.of(1))
    halted(job, 0, restart_index=1)
    halted(job, 2, restart_index=1)
    job.ready(job.of(1))
    stuck = job.of(1)
    for rank in (0, 2):
        job.resumed(rank)
        job.finished(rank, LAST)
    job.now += 400.0
    sights = [job.sight(rank, LAST, seconds=400.0, phase=Phase.RECOVERING, stopped=rank == 1) for rank in job.ranks]
    job.seen(*sights)
    assert not job.all(EndJob)
    assert job.last(orders.FenceWorker).worker == stuck
