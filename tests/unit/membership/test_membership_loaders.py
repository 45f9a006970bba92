"""Loaders as ranks show them: equally long, shares of their own, and the same again in a replacement."""

import pytest
from tests.unit.membership.membership_job import Job

from regrow.core.ids import Rank, WorkerId
from regrow.core.messages import orders
from regrow.core.messages.data import BatchRecord, LoaderShown
from regrow.core.records import Noted
from regrow.membership.machine import EndJob
from regrow.membership.recovery.loaders import Loaders


def show(job: Job, worker: WorkerId, share: int, *digests: str, until: int = 36, length: int = 12) -> None:
    reads = [[BatchRecord(share, 2, digest)] for digest in digests]
    job.tell(LoaderShown(worker, "Stream", until, length, reads))


def notes(job: Job) -> list[str]:
    return [each.text for each in job.all(Noted)]


@pytest.mark.parametrize(
    ("numbers", "told"),
    [
        ({"until": 30, "length": 10}, "rank 1 trains 3 epochs of 10 steps, and rank 0 3 epochs of 12 steps (Stream)"),
        ({"until": 24, "length": 12}, "rank 1 trains 2 epochs of 12 steps, and rank 0 3 epochs of 12 steps (Stream)"),
        ({"until": 30, "length": 0}, "rank 1 trains until step 30, and rank 0 3 epochs of 12 steps (Stream)"),
    ],
)
def test_ranks_that_would_train_another_number_of_steps_are_refused_with_both_numbers(
    numbers: dict[str, int], told: str
) -> None:
    job = Job(2)
    show(job, job.of(0), 0, "a")
    job.ready(job.of(0), 0)
    show(job, job.of(1), 1, "b", **numbers)
    assert job.end.code == 1
    assert told in job.end.diagnosis and "length=" in job.end.diagnosis


def test_a_standby_that_would_train_another_number_of_steps_is_not_used() -> None:
    job = Job(2, standbys=1)
    for rank in job.ranks:
        show(job, job.of(rank), rank, str(rank))
        job.ready(job.of(rank), 0)
    job.joined()
    standby = job.standby()
    show(job, standby, 1, "1", until=30, length=10)
    assert job.last(orders.FenceWorker).worker == standby and not job.all(EndJob)
    assert "it is not used" in notes(job)[-1]


def test_all_may_train_another_number_of_steps_when_all_are_started_anew() -> None:
    loaders, worker = Loaders(), WorkerId("w")
    assert loaders.refusal(LoaderShown(worker, "Stream", 36), Rank(0)) == ""
    assert loaders.refusal(LoaderShown(worker, "Stream", 30), Rank(1)) != ""
    loaders.forget()
    assert loaders.refusal(LoaderShown(worker, "Stream", 30), Rank(1)) == ""


@pytest.mark.parametrize(
    ("zero", "one", "told"),
    [
        (("a", "c"), ("a", "c"), True),
        (("a", "c"), ("b", "d"), False),
        (("a", "c"), ("a", "d"), False),  # a short data set comes round differently
        (("a", "a"), ("a", "a"), False),  # the same in each step: a benchmark's, or all of a small data set
        (("", ""), ("", ""), False),
    ],
)
def test_ranks_that_read_the_same_in_shares_of_their_own_are_told_at_the_second_step(
    zero: tuple[str, str], one: tuple[str, str], told: bool
) -> None:
    job = Job(2)
    for rank, digests in enumerate((zero, one)):
        show(job, job.of(rank), rank, digests[0])
        job.ready(job.of(rank), 0)
    job.joined()
    assert notes(job) == []
    show(job, job.of(0), 0, *zero)
    show(job, job.of(1), 1, *one)
    found = notes(job)
    assert bool(found) is told
    if told:
        assert "rank 0 and rank 1 have read the same batches in steps 0 and 1" in found[0] and "Stream" in found[0]


def test_ranks_of_one_share_read_the_same_by_design() -> None:
    job = Job(2)
    for rank in job.ranks:
        show(job, job.of(rank), 0, "a")
        job.ready(job.of(rank), 0)
    job.joined()
    for rank in job.ranks:
        show(job, job.of(rank), 0, "a", "b")
    assert notes(job) == []


@pytest.mark.parametrize(("digest", "told"), [("b", False), ("x", True), ("", False)])
def test_who_replaces_a_rank_and_reads_another_first_batch_is_told_once(digest: str, told: bool) -> None:
    job = Job(2)
    for rank, read in enumerate("ab"):
        show(job, job.of(rank), rank, read)
        job.ready(job.of(rank), 0)
    job.joined().stepped(5)
    for _ in range(2):
        job.exited(job.of(1))
        job.halted(0, 6)
        show(job, job.of(1), 1, digest)
        job.ready(job.of(1))
        job.joined().stepped(6)
    found = [each for each in notes(job) if "another batch of step 0" in each]
    assert len(found) == told and not job.all(EndJob)
    assert all("Stream gives rank 1, which comes in now" in each for each in found)
