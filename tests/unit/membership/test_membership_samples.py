"""Replicas that differ are found from what workers tell of their state, and that is said without stopping anybody."""

from typing import Any

import msgspec
import pytest
from tests.unit.membership.membership_job import Job

from regrow.core.ids import Generation, Rank, StepNo, WorkerId
from regrow.core.messages import facts, orders
from regrow.core.messages.replicas import OwnValues, StateSampled
from regrow.core.records import IncidentClosed, JobEnded, ReplicasDiverged
from regrow.membership.replica_digests import Samples, compare
from regrow.observe.story import not_kept
from regrow.train.worker.cost_interval import CostInterval


def told(*looks: dict[str, int]) -> dict[Rank, dict[str, int]]:
    return {Rank(rank): look for rank, look in enumerate(looks)}


@pytest.mark.parametrize(
    ("looks", "alike", "parts", "odd"),
    [
        ([{"a": 1}, {"a": 2}], ((0,), (1,)), ("a",), ()),
        ([{"a": 1, "b": 7}, {"a": 2, "b": 7}, {"a": 1, "b": 7}], ((0, 2), (1,)), ("a",), (1,)),
        ([{"a": 1}, {"a": 2}, {"a": 3}], ((0,), (1,), (2,)), ("a",), ()),
        ([{"a": 1}, {"a": 1}, {"a": 2}, {"a": 2}], ((0, 1), (2, 3)), ("a",), ()),
        ([{"a": 1}, {"a": 1, "b": 1}], ((0,), (1,)), ("b",), ()),
    ],
)
def test_who_differs_from_whom_and_in_what(looks: list[dict[str, int]], alike: Any, parts: Any, odd: Any) -> None:
    found = compare(StepNo(4), told(*looks))
    assert found is not None
    assert (found.alike, found.parts, found.odd) == (alike, parts, odd)


def test_equal_replicas_are_nothing() -> None:
    assert compare(StepNo(4), told({"a": 1}, {"a": 1})) is None


def sample(rank: int, step: int, value: int, *, generation: int = 1, whole: bool = False) -> StateSampled:
    tensors = {"model.weight[0:8]": value}
    return StateSampled(WorkerId(f"w{rank}"), Generation(generation), StepNo(step), tensors, {"n": 3}, whole=whole)


def test_samples_are_compared_when_all_replicas_have_told_theirs() -> None:
    samples = Samples()
    assert samples.apply(sample(0, 16, 5), Rank(0), "h", replicas=2) is None
    assert samples.apply(sample(0, 16, 6), Rank(0), "another part", replicas=2) is None
    found = samples.apply(sample(1, 16, 6), Rank(1), "h", replicas=2)
    assert found is not None and found.parts == ("model.weight[0:8]",) and found.in_tensors


def test_plain_variables_of_which_ranks_have_their_own_are_known_by_holding() -> None:
    samples = Samples()
    for rank, (mine, holding) in enumerate(((1, "h"), (2, "h"), (3, "another part"), (3, "another part"))):
        told = msgspec.structs.replace(sample(rank, 16, 5), variables={"loop\nmine": mine, "loop\nseen": 8})
        assert samples.apply(told, Rank(rank), holding, replicas=2) is None
    assert samples.own["h"] == {"loop\nmine"}
    assert not samples.own["another part"]


def test_who_never_tells_is_left_out_and_samples_of_an_older_generation_are_forgotten() -> None:
    samples = Samples()
    for step in range(16, 16 * 9, 16):
        assert samples.apply(sample(0, step, 5), Rank(0), "h", replicas=3) is None
    assert samples.apply(sample(1, 16, 6), Rank(1), "h", replicas=3) is None
    found = samples.apply(sample(0, 16 * 9, 5), Rank(0), "h", replicas=3)
    assert found is not None and found.step == 16 and found.alike == ((0,), (1,))
    assert samples.apply(sample(1, 32, 6, generation=2), Rank(1), "h", replicas=2) is None


def test_the_same_difference_is_said_ever_less_often() -> None:
    samples, said = Samples(), []
    for step in range(1, 17):
        found = compare(StepNo(step), told({"a": 1}, {"a": 2}))
        assert found is not None
        said.append(samples.news(found))
    assert sum(said) == 5


# --- in a job -------------------------------------------------------------------------------------------------------


def tell(job: Job, values: list[int], step: int, *, whole: bool = False) -> None:
    for rank, value in enumerate(values):
        fact = sample(rank, step, value, generation=job.machine.generation, whole=whole)
        job.tell(StateSampled(job.of(rank), fact.generation, fact.step, fact.tensors, fact.python, whole=whole))


def test_ranks_that_build_other_values_are_told_before_the_first_step_and_train() -> None:
    job = Job(3)
    for rank in job.ranks:
        job.ready(job.of(rank), 0, parts={"model.x": 1, "trainer.is_main": int(rank == 0)})
    said = job.last(ReplicasDiverged)
    assert said.text.startswith("rank 0 starts with other values than ranks 1 and 2 in trainer.is_main.")
    job.joined()
    assert job.machine.snapshot().phase == "training"


def test_a_difference_while_training_is_said_and_stops_nobody() -> None:
    job = Job(3).trained(4)
    tell(job, [5, 5, 6], 16)
    assert "rank 2 differs from ranks 0 and 1 in model.weight[0:8]" in job.last(ReplicasDiverged).text
    assert not job.all(orders.HaltGeneration) and not job.all(orders.FenceWorker)


def test_a_newcomer_that_has_not_the_survivors_state_is_replaced_once() -> None:
    job = Job(3).trained(4)
    for times in (1, 2):
        job.exited(job.of(0))
        for rank in (1, 2):
            job.halted(rank, 5)
        newcomer = job.of(0)
        job.ready(newcomer)
        job.joined().stepped(5)
        tell(job, [6, 5, 5], 6, whole=True)
        assert (newcomer in {each.worker for each in job.all(orders.FenceWorker)}) == (times == 1)
        if times == 1:
            assert "rank 0 came in by a recovery" in job.last(ReplicasDiverged).text
            for rank in (1, 2):
                job.halted(rank, 6)
            job.ready(job.of(0))
            job.joined().stepped(6)


def made(job: Job, made: list[dict[str, int]], *, weight: list[int], step: int = 1) -> None:
    for rank, mine in enumerate(made):
        tensors = {"model.weight": weight[rank]}
        job.tell(StateSampled(job.of(rank), job.machine.generation, StepNo(step), tensors, {}, made=mine))


@pytest.mark.parametrize(
    "parts",
    [[{"optim.a.momentum": 1}, {"optim.a.momentum": 2}], [{"optim.a.momentum": 1}, {}]],
    ids=["a part of each tensor", "some tensors each"],
)
def test_optimizers_that_shard_their_state_end_the_job_at_its_first_steps_with_the_cure(
    parts: list[dict[str, int]],
) -> None:
    job = Job(2).trained(1)
    made(job, parts, weight=[7, 7])
    ended = job.last(JobEnded)
    assert ended.code == 1 and ended.diagnosis.startswith("each rank has a part of optim.a.momentum")
    assert "part=" in ended.diagnosis and "--buddy-every" in ended.diagnosis and "--no-audit" in ended.diagnosis


def test_ranks_that_train_models_of_their_own_are_told_and_train() -> None:
    job = Job(2).trained(1)
    made(job, [{"optim.a.momentum": 1}, {"optim.a.momentum": 2}], weight=[7, 8])
    assert "ranks 0 and 1 differ in" in job.last(ReplicasDiverged).text
    assert job.machine.snapshot().phase == "training"


def test_no_newcomer_is_blamed_for_a_difference_that_was_there_before_any_fault() -> None:
    job = Job(3).trained(4)
    tell(job, [4, 5, 5], 4)
    job.exited(job.of(0))
    for rank in (1, 2):
        job.halted(rank, 5)
    job.ready(job.of(0))
    job.joined().stepped(5)
    tell(job, [6, 5, 5], 6, whole=True)
    assert job.all(orders.FenceWorker) == [] and job.machine.snapshot().phase == "training"
    assert "rank 0 came in by a recovery" not in job.last(ReplicasDiverged).text


@pytest.mark.parametrize("unlike", [[], ["object meter: Meter\nsum"], None], ids=["one gives", "more", "its own copy"])
def test_values_that_a_replaced_rank_has_not_of_its_own_any_more_stand_in_the_incident(
    unlike: list[str] | None,
) -> None:
    job = Job(2).trained(4)
    for rank in job.ranks:
        fact = sample(rank, 1, 5, generation=job.machine.generation)
        own = {"train (__main__)\nrunning": rank, "module __main__\nlast": rank, "train (__main__)\nseen": 7}
        job.tell(msgspec.structs.replace(fact, worker=job.of(rank), variables=own))
    job.exited(job.of(1))
    job.halted(0, 5)
    job.ready(job.of(1))
    job.resumed(0)
    job.tell(facts.WorkerResumed(job.of(1), job.machine.generation, unlike=unlike))
    job.stepped(5)
    names = [] if unlike is None else ["last", "running in train()", *(["meter.sum"] if unlike else [])]
    closed = job.last(IncidentClosed)
    assert closed.not_kept == {name: [1] for name in names}
    assert (not_kept([closed]) == "") == (not names)
    assert all(f"`{name}`" in not_kept([closed]) for name in names)


@pytest.mark.parametrize(("step", "sure"), [(5, True), (5, False), (6, True)])
def test_who_takes_a_rank_gets_what_its_worker_has_left_of_its_own_for_that_step(step: int, sure: bool) -> None:
    job = Job(2).trained(4)
    for rank in job.ranks:
        fact = sample(rank, 1, 5, generation=job.machine.generation)
        job.tell(msgspec.structs.replace(fact, worker=job.of(rank), variables={"train (__main__)\nrunning": rank}))
    assert {order.worker for order in job.all(orders.KeepOwn)} == {job.of(0), job.of(1)}
    left = OwnValues(StepNo(step), b"values", sure)
    job.tell(facts.WorkerExited(job.of(1), -9, job.now, left=[OwnValues(StepNo(4), b"older"), left]))
    job.halted(0, 5)
    job.ready(job.of(1))
    assert job.last(orders.KeepOwn) == orders.KeepOwn(job.of(1), ["train (__main__)\nrunning"])
    forms = {form.rank: form for form in job.all(orders.FormGeneration)[-2:]}
    assert (forms[Rank(0)].own, forms[Rank(1)].own) == (None, left if step == 5 else None)


# --- how often ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cost", [1e-5, 1e-3, 0.02])
@pytest.mark.parametrize("step", [1e-3, 0.05, 1.0])
def test_samples_cost_at_most_a_part_of_a_step(cost: float, step: float) -> None:
    pace = CostInterval()
    pace.took(cost, step)
    assert pace.every & (pace.every - 1) == 0
    assert cost / (pace.every * step) <= 0.0025
    assert pace.every == 1 or cost / (pace.every * step) > 0.00125 or pace.every * step < 2 / 500


def test_many_ranks_tell_the_coordinator_less_often() -> None:
    pace = CostInterval()
    pace.world = 100_000
    pace.took(1e-4, 0.5)
    assert pace.every * 0.5 >= 200
