"""First difference between two traces of a step, its weight, and the cause that is named."""

from typing import Any

import pytest
from tests.unit.membership.membership_job import Job

from regrow.core.ids import Rank, StepNo
from regrow.core.messages.replacements import (
    ProveReplacement,
    ReplacementProven,
    ReplacementRefuted,
    ReplacementUnproven,
)
from regrow.train.proving.naming import likely, refutation
from regrow.train.proving.surroundings import names_read
from regrow.train.proving.trace import Computation, Computed, SeenAround, Trace, counts, differences


def trace(*entries: tuple[Computation, str, int], lost: bool = False, **more: Any) -> Trace:
    computed = [Computed(kind, key, digest, f"label {key}", free=not lost) for kind, key, digest in entries]
    return Trace(StepNo(7), computed, **more)


def test_equal_steps_differ_in_nothing() -> None:
    one = trace((Computation.GRADIENT, "w", 1), (Computation.LOGGED, "loss", 2))
    assert differences(one, one) == []


@pytest.mark.parametrize(
    ("newcomer", "labels", "counted"),
    [
        (trace((Computation.GRADIENT, "w", 5), (Computation.LOGGED, "loss", 2)), ["label w"], True),
        (trace((Computation.GRADIENT, "w", 1), (Computation.LOGGED, "loss", 9)), ["label loss"], False),
        (trace((Computation.LOGGED, "loss", 2)), ["label w"], True),
        (
            trace((Computation.GRADIENT, "w", 1), (Computation.LOGGED, "loss", 2), (Computation.GIVEN, "x", 3)),
            ["label x"],
            True,
        ),
        (trace((Computation.GRADIENT, "w", 5), lost=True), [], False),
    ],
    ids=["another gradient", "a clock in the log", "none", "one call more", "it rests on an answer that was not kept"],
)
def test_what_differs_is_found_in_order(newcomer: Trace, labels: list[str], counted: bool) -> None:
    found = differences(trace((Computation.GRADIENT, "w", 1), (Computation.LOGGED, "loss", 2)), newcomer)
    assert ([each.label for each in found], counts(found)) == (labels, counted)


def test_a_cause_is_what_differs_and_is_used_by_the_body() -> None:
    rank = trace(
        (Computation.GRADIENT, "w", 1),
        around={"a.calls": SeenAround(1, "count", "8"), "history": SeenAround(1, "list")},
    )
    newcomer = trace(
        (Computation.GRADIENT, "w", 2),
        around={"a.calls": SeenAround(2, "count", "1"), "history": SeenAround(2, "list")},
        used=[".calls"],
    )
    assert likely(rank, newcomer, Rank(1)) == ["`a.calls` (8 on rank 1, 1 there), a counter"]
    told = refutation(rank, newcomer, differences(rank, newcomer), rank_number=Rank(1))
    assert "step 7" in told and "label w differs" in told and "a counter" in told


def test_a_variable_that_is_bound_before_it_is_read_is_no_cause() -> None:
    code = compile("x = f(); y = x + seen.calls; total += 1", "script.py", "exec")
    assert names_read(code) == {"f", "seen", ".calls", "total"}


def proving() -> tuple[Job, ProveReplacement]:
    job = Job(world=2, standbys=1, proof=True).trained()
    job.ready(job.standby())
    for step in range(4):
        job.committed(0, step)
        job.committed(1, step)
    asked = [each for each in job.said if isinstance(each, ProveReplacement)]
    assert len(asked) == 1, job.said
    return job, asked[0]


def asked_of(job: Job) -> list[int]:
    return [int(each.rank) for each in job.said if isinstance(each, ProveReplacement)]


def goes_on(job: Job, after: float = 0.0) -> None:
    job.now += after
    job.committed(0, 5)
    job.committed(0, 6)


def tell_proven(job: Job, step: int, *, held: float = 0.25, seconds: float = 0.25) -> None:
    asked = [each for each in job.said if isinstance(each, ProveReplacement)][-1]
    job.tell(ReplacementProven(asked.worker, asked.generation, asked.rank, StepNo(step), held=held, seconds=seconds))


def test_the_first_steps_have_a_proof_of_another_rank_than_0_and_of_rank_0_then() -> None:
    job, asked = proving()
    assert asked.rank == 1 and asked.worker == job.standby() and asked.endpoint == f"at {job.of(1)}"
    tell_proven(job, 5)
    assert job.machine.snapshot().replaceable == "replaceable: last proven at step 5"
    goes_on(job, 1.0)
    assert asked_of(job) == [1, 0]
    tell_proven(job, 5)
    for after, more in ((150.0, 0), (60.0, 1)):  # a second round is paid for by 200
        goes_on(job, after)
        assert len(asked_of(job)) == 2 + more


def test_each_rank_is_proven_in_turn_and_rank_0_that_could_not_be_is_not_asked_at_once_again() -> None:
    job = Job(world=4, standbys=1, proof=True).trained()
    job.ready(job.standby())
    for step in range(4):
        for rank in range(4):
            job.committed(rank, step)
    tell_proven(job, 5)
    goes_on(job, 1.0)
    assert len(asked_of(job)) == 2 and asked_of(job)[-1] == 0
    asked = [each for each in job.said if isinstance(each, ProveReplacement)][-1]
    job.tell(ReplacementUnproven(asked.worker, asked.generation, Rank(0), "it was busy"))
    for _ in range(7):
        goes_on(job, 300.0)
        tell_proven(job, 5)
    assert asked_of(job) == [1, 0, 2, 3, 0, 1, 2, 3]


def test_a_refutation_is_the_last_word_and_what_was_not_compared_is_said() -> None:
    job, asked = proving()
    job.tell(ReplacementUnproven(asked.worker, asked.generation, Rank(1), "it was busy"))
    assert job.machine.snapshot().replaceable == "replaceable: not proven, because it was busy"
    job.tell(ReplacementRefuted(asked.worker, asked.generation, Rank(1), StepNo(6), "a counter"))
    assert job.machine.snapshot().replaceable == "not replaceable by newcomers: a counter"
    job.now += 1e6
    job.committed(0, 5)
    assert len([each for each in job.said if isinstance(each, ProveReplacement)]) == 1


def test_nothing_is_asked_where_that_is_not_wanted() -> None:
    job = Job(world=2, standbys=1).trained()
    job.ready(job.standby())
    for step in range(9):
        job.committed(0, step)
    assert not [each for each in job.said if isinstance(each, ProveReplacement)]
