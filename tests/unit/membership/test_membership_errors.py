"""Errors of scripts: their source, the order in which people hear of them, and their cost."""

import msgspec
import pytest
from tests.unit.membership.membership_job import OOM, Job

from regrow.core.exit_codes import DEVICE_FAILED
from regrow.core.ids import NO_STATE, Rank, StepNo, WorkerId
from regrow.core.messages import facts, orders
from regrow.core.messages.replacements import ReplacementProven, ReplacementRefuted
from regrow.core.messages.vocabulary import ErrorReport, FaultKind
from regrow.core.records import JobEnded, Noted, ReplacementJudged
from regrow.membership.diagnosis import cannot_be_ended

RESET = ErrorReport("RuntimeError", "connection reset", "Traceback: train.py, line 9", "line 9")


def again(job: Job, step: int) -> None:
    """All halt before the step, and stand in the next generation."""
    for rank in job.ranks:
        job.halted(rank, step)
    job.joined()


def tear(job: Job, rank: int, step: int) -> None:
    job.tell(facts.WorkerHalted(job.of(rank), job.machine.generation, NO_STATE, step=StepNo(step)))


def test_the_same_error_on_all_ranks_is_one_fault_and_ends_the_job_the_second_time() -> None:
    job = Job(3, max_faults=1).trained(0)
    for rank in job.ranks:
        job.faulted(rank, step=1)
    again(job, 1)
    assert not job.all(JobEnded)
    job.faulted(2, step=1)
    assert (job.end.code, "the same error twice" in job.end.diagnosis) == (1, True)


def test_an_error_with_another_message_each_time_ends_the_job_the_third_time() -> None:
    job = Job(2).trained(0)
    for attempt in range(3):
        assert not job.all(JobEnded)
        job.faulted(1, step=1, error=msgspec.structs.replace(OOM, message=f"after {attempt} s"))
        if attempt < 2:
            again(job, 1)
    assert job.end.code == 1


def test_a_symptom_that_comes_three_times_without_a_cause_is_the_scripts_error() -> None:
    job = Job(2).trained(0)
    for attempt in range(3):
        assert not job.all(JobEnded)
        job.faulted(1, step=1, error=RESET, kind=FaultKind.COLLECTIVE)
        if attempt < 2:
            again(job, 1)
    assert job.end.code == 1
    assert RESET.traceback in job.end.diagnosis


def test_a_symptom_with_a_cause_does_not_count() -> None:
    job = Job(3).trained(0)
    for _ in range(4):
        job.faulted(1, step=1, error=RESET, kind=FaultKind.COLLECTIVE)
        job.exited(job.of(2))
        job.ready(job.of(2))
        job.halted(0, 1)
        job.halted(1, 1)
        job.joined()
    assert not job.all(JobEnded)


def test_a_torn_state_is_told_by_the_scripts_error_where_no_process_was_lost() -> None:
    job = Job(2).trained(0)
    job.faulted(1, step=1)
    tear(job, 0, 1)
    tear(job, 1, 1)
    assert job.end.code == 1
    assert job.end.diagnosis.startswith(f"rank 1 failed at step 1:\n{OOM.traceback}")
    assert "ranks 0 and 1 were in the middle of the update of step 1" in job.end.diagnosis
    assert "lost" not in job.end.diagnosis


def test_a_lost_process_is_named_with_those_that_it_left_torn() -> None:
    job = Job(3).trained(0)
    job.exited(job.of(1))
    job.ready(job.of(1))
    tear(job, 0, 1)
    tear(job, 2, 1)
    assert job.end.code == 1
    assert "the last copy of the training state (at step 1) was lost" in job.end.diagnosis
    assert "ranks 0 and 2 were in the middle of the update of step 1" in job.end.diagnosis


@pytest.mark.parametrize("seen_by", [0, 1])
def test_all_ranks_give_bodies_up_as_a_whole_as_soon_as_one_has_seen_that_they_must(seen_by: int) -> None:
    job = Job(2).trained(0)
    assert not any(order.whole_body for order in job.all(orders.FormGeneration))
    job.faulted(1, step=1)
    for rank in job.ranks:
        job.tell(facts.WorkerHalted(job.of(rank), job.machine.generation, StepNo(1), whole_body=rank == seen_by))
    forms = [order for order in job.all(orders.FormGeneration) if order.generation == 2]
    assert [(order.rank, order.whole_body) for order in forms] == [(Rank(0), True), (Rank(1), True)]


def test_what_workers_have_seen_is_said_once() -> None:
    job = Job(2).trained(0)
    for rank in job.ranks:
        job.tell(facts.WorkerNoted(job.of(rank), "a closure"))
    assert [line.text for line in job.all(Noted)] == ["a closure"]


def test_of_thousands_of_workers_that_cannot_be_ended_the_first_are_named() -> None:
    said = cannot_be_ended([WorkerId(f"w{number}") for number in range(3000)])
    assert said.startswith("workers w0, w1, w2, w3, w4, w5, w6, w7 and 2,992 more could not be ended")
    assert cannot_be_ended([WorkerId("a"), WorkerId("b")]).startswith("workers a, b could not")


def test_one_refutation_of_a_newcomer_outweighs_proofs_and_is_written_once() -> None:
    job = Job(2).trained(0)
    generation = job.machine.generation
    job.tell(ReplacementProven(job.of(0), generation, Rank(0), StepNo(3)))
    job.tell(ReplacementRefuted(job.of(1), generation, Rank(1), StepNo(4), "line 12 draws from a clock"))
    job.tell(ReplacementRefuted(job.of(0), generation, Rank(0), StepNo(5), "another reason"))

    judged = job.all(ReplacementJudged)
    assert [(each.rank, each.step, each.reason) for each in judged] == [
        (0, 3, ""),
        (1, 4, "line 12 draws from a clock"),
    ]


def test_an_error_that_came_only_behind_a_fault_is_not_called_the_scripts() -> None:
    job = Job(2).trained(0)
    job.exited(job.of(1))
    job.halted(0, 1)
    job.ready(job.of(1))
    job.joined().faulted(0, step=1)
    again(job, 1)
    job.faulted(0, step=1)
    assert "both times in a body that was run again after a fault (rank 1 was ended by SIGKILL)" in job.end.diagnosis


def breaks(job: Job, rank: int, step: int) -> None:
    """The rank's device fails, and all stand again."""
    job.exited(job.of(rank), DEVICE_FAILED)
    for other in job.ranks:
        if other != rank:
            job.halted(other, step)
    if not job.all(JobEnded):
        job.ready(job.of(rank))
        job.joined()


def test_two_devices_that_fail_one_after_the_other_at_a_step_are_the_scripts_error() -> None:
    job = Job(2, nodes=2, slots=2).trained(0)
    home = job.machine.roster.workers[job.of(1)].node
    breaks(job, 1, 1)
    assert job.machine.roster.workers[job.of(1)].node == home, "again where it was"
    breaks(job, 1, 1)
    assert not job.all(JobEnded), "one device has failed twice: it may be broken"
    assert job.machine.roster.workers[job.of(1)].node != home
    breaks(job, 1, 1)
    assert job.end.code == 1
    assert "the script breaks the devices of rank 1 at step 1: n1's slot 0 and n0's slot 1" in job.end.diagnosis


def test_the_only_device_of_a_rank_ends_the_job_at_its_third_failure_in_a_step() -> None:
    job = Job(2).trained(0)
    for _ in range(3):
        assert not job.all(JobEnded)
        breaks(job, 1, 1)
    assert "the device of rank 1 failed 3 times at step 1, and there is no other" in job.end.diagnosis


def test_devices_that_fail_together_or_at_other_steps_are_nobodys_error() -> None:
    job = Job(4).trained(0)
    for step in range(1, 10, 2):
        for rank in (1, 2):
            job.exited(job.of(rank), DEVICE_FAILED)
        for rank in (0, 3):
            job.halted(rank, step)
        for rank in (1, 2):
            job.ready(job.of(rank))
        job.joined().stepped(step).stepped(step + 1)
    assert not job.all(JobEnded)
