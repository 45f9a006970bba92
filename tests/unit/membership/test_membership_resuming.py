"""All ranks go on from one durable checkpoint, or from none."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.membership.membership_job import Job

from regrow.core.ids import NO_STATE, StepNo
from regrow.core.messages import orders
from regrow.core.messages.checkpoints import FinishCheckpoint, PartsWritten, SnapshotHeld, WriteCheckpoint
from regrow.core.records import Noted
from regrow.membership.recovery.resuming import AllAgree, AllReadAgain, NothingToRead, agree

STEPS = 6


@given(
    st.lists(st.sets(st.integers(1, STEPS)), min_size=1, max_size=4),
    st.booleans(),
)
def test_they_come_down_to_the_newest_that_all_can_read(damaged: list[set[int]], needed: bool) -> None:
    """`damaged`: of the checkpoints 1 to 6, those that each rank cannot read."""
    avoided: dict[StepNo, str] = {}
    refused: dict[StepNo, str] = {}
    whole = [step for step in range(STEPS, 0, -1) if not any(step in each for each in damaged)]
    for _ in range(STEPS + 2):
        stands = []
        for each in damaged:
            there = [StepNo(step) for step in range(STEPS, 0, -1) if step not in avoided]
            read = next((step for step in there if step not in each), None)
            tried = there if read is None else there[: there.index(read)]
            refused.update(dict.fromkeys(tried, "damaged"))
            stands.append(read if read is not None else NO_STATE if tried else StepNo(0))
        match agree(stands, refused, avoided, needed=needed):
            case AllReadAgain(avoid):
                assert avoid.keys() > avoided.keys()
                avoided = {**avoided, **avoid}
            case AllAgree(step):
                assert step == (whole[0] if whole else 0)
                assert step or not needed
                return
            case NothingToRead():
                assert needed
                assert not whole
                return
    pytest.fail("they do not come to an end")


def test_a_rank_that_finds_nothing_where_another_has_read_ends_the_job() -> None:
    found = agree([StepNo(9), StepNo(0)], {}, {}, needed=False)
    assert isinstance(found, NothingToRead)
    assert "rank 1 finds no checkpoint where rank 0 has read that of step 9" in found.why


def notes(job: Job) -> list[str]:
    return [note.text for note in job.all(Noted)]


def started(**more: Any) -> Job:
    return Job(2, resume=True, durable=True, checkpoint_every=10.0, **more)


def test_all_start_again_without_what_one_could_not_read_and_it_is_kept_for_none_of_the_newest() -> None:
    job = started()
    job.ready(job.of(0), 9)
    job.ready(job.of(1), 5, refused={StepNo(9): "step-9: damaged"})
    assert "the checkpoint of step 9 is not used: rank 1: step-9: damaged" in notes(job)
    for rank in job.ranks:
        job.exited(job.of(rank))
    again = job.all(orders.SpawnWorker)[-2:]
    assert [(each.resume, each.avoid) for each in again] == [(True, [9])] * 2
    for rank in job.ranks:
        job.ready(job.of(rank), 5)
    assert notes(job)[-1] == "training goes on from the checkpoint of step 5"
    assert job.machine.step == 5
    for rank in job.ranks:
        job.resumed(rank)


@pytest.mark.parametrize("must", [False, True])
def test_where_none_can_be_read_the_job_starts_or_ends_as_it_was_asked(must: bool) -> None:
    job = started(must_resume=must)
    for rank in job.ranks:
        job.ready(job.of(rank), NO_STATE, refused={StepNo(9): "damaged", StepNo(5): "damaged too"})
    if must:
        assert job.end.code == 1
        assert "none of the checkpoints in --checkpoint-dir can be read: step 9: rank 0: damaged; step 5" in (
            job.end.diagnosis
        )
        return
    for rank in job.ranks:
        job.exited(job.of(rank))
    assert [each.avoid for each in job.all(orders.SpawnWorker)[-2:]] == [[5, 9]] * 2
    for rank in job.ranks:
        job.ready(job.of(rank), 0)
    assert "training starts from step 0" in notes(job)[-1]


def test_a_job_that_has_trained_does_not_start_from_the_beginning_in_silence() -> None:
    job = Job(2, durable=True, checkpoint_every=10.0).trained(7)
    job.exited(job.of(0))
    job.exited(job.of(1))
    for rank in job.ranks:
        job.ready(job.of(rank))
    for fence in job.all(orders.FenceWorker):
        job.exited(fence.worker)
    for rank in job.ranks:
        job.ready(job.of(rank), NO_STATE, refused={StepNo(5): "damaged"})
    assert job.end.code == 1
    assert "step 5: rank 0: damaged" in job.end.diagnosis


def test_must_is_not_content_with_nothing() -> None:
    job = started(must_resume=True)
    for rank in job.ranks:
        job.ready(job.of(rank), 0)
    assert job.end.code == 1
    assert "--resume=must asks for one" in job.end.diagnosis


def test_what_was_refused_and_that_it_is_the_last_goes_to_the_writer() -> None:
    job = started()
    for rank in job.ranks:
        job.ready(job.of(rank), 5, refused={StepNo(9): "damaged"})
    for rank in job.ranks:
        job.resumed(rank)
    for rank in job.ranks:
        job.finished(rank, 12)
    job.tell(SnapshotHeld(job.of(0), StepNo(12), StepNo(12)))
    written = job.last(WriteCheckpoint)
    assert written.last
    job.tell(PartsWritten(written.node, written.attempt, written.step, written.ranks, 1, 0.1, ["ck/step-5"]))
    assert "the disk is full: ck/step-5 was removed to make room for the last state" in notes(job)
    finish = job.last(FinishCheckpoint)
    assert (finish.refused, finish.last) == ([9], True)
