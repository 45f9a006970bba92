"""Stragglers: who is named, who never is, and that nobody is ended for being slow."""

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.membership.membership_job import Job, mend

from regrow.core.ids import NodeId, Rank, StepNo
from regrow.core.messages import facts, orders
from regrow.core.messages.data import BatchRecord
from regrow.core.records import NodeJudged, Noted
from regrow.membership.recovery.stragglers import (
    FIRST_STEPS,
    SlowRanks,
    StragglerFound,
    StragglerOver,
    outliers,
)

STEPS = 6
worlds = st.integers(2, 24)
bases = st.floats(0.02, 5.0)
seeds = st.integers(0, 2**32 - 1)


def noisy(base: float, world: int, noise: float, seed: int) -> dict[Rank, float]:
    draw = random.Random(seed)
    return {Rank(rank): base * draw.uniform(1 - noise, 1 + noise) for rank in range(world)}


def run(slow: SlowRanks, steps: list[dict[Rank, float]]) -> list[StragglerFound | StragglerOver]:
    return [found for times in steps for rank, own in times.items() for found in slow.apply(rank, own, len(times))]


@given(worlds, bases, seeds)
def test_equal_ranks_with_noise_have_no_outlier(world: int, base: float, seed: int) -> None:
    assert outliers(noisy(base, world, 0.1, seed))[0] == set()


@given(worlds, bases, seeds, st.data())
def test_a_rank_slowed_by_half_is_the_outlier(world: int, base: float, seed: int, data: st.DataObject) -> None:
    slow = Rank(data.draw(st.integers(0, world - 1)))
    times = noisy(base, world, 0.03, seed)
    times[slow] *= 1.5
    assert outliers(times)[0] == {slow}


@given(st.lists(st.floats(0.0, 10.0), min_size=2, max_size=20), st.randoms(use_true_random=False))
def test_it_does_not_matter_in_which_order_ranks_are(times: list[float], shuffled: random.Random) -> None:
    places = list(range(len(times)))
    shuffled.shuffle(places)
    named, usual = outliers({Rank(rank): seconds for rank, seconds in enumerate(times)})
    moved, same = outliers({Rank(place): times[place] for place in places})
    assert (moved, same) == (named, usual)


@given(worlds, bases, seeds, st.floats(0.01, 100.0))
def test_the_unit_of_time_is_nothing_to_it_above_the_least(world: int, base: float, seed: int, factor: float) -> None:
    times = noisy(base, world, 0.4, seed)
    if min(base, base * factor) * 0.25 * 0.6 > 0.006:
        assert outliers({rank: own * factor for rank, own in times.items()})[0] == outliers(times)[0]


def test_where_many_are_slow_or_steps_are_tiny_nobody_is() -> None:
    assert outliers({Rank(rank): 1.0 + (rank % 2) for rank in range(8)})[0] == set(), "half of them"
    assert outliers({Rank(0): 0.001, Rank(1): 0.001, Rank(2): 0.004})[0] == set(), "3 ms"
    assert outliers({Rank(0): 1.0})[0] == set()
    assert outliers({})[0] == set()


@given(worlds, seeds, st.integers(0, 23), st.integers(0, 5))
def test_a_straggler_is_named_once_until_it_recovers(world: int, seed: int, which: int, once: int) -> None:
    slow, book = Rank(which % world), SlowRanks(STEPS)

    def step(number: int, factor: float) -> dict[Rank, float]:
        times = noisy(1.0, world, 0.03, seed + number)
        times[slow] *= factor
        return times

    quiet = [step(number, 1.0) for number in range(FIRST_STEPS + 2)]
    blips = [step(100 + number, 2.0 if number % STEPS == once else 1.1) for number in range(4 * STEPS)]
    assert run(book, quiet) == []
    assert run(book, blips) == [], "slow once in a while, and by a tenth always"
    found = run(book, [step(200 + number, 1.6) for number in range(5 * STEPS)])
    assert [(type(each), each.rank) for each in found] == [(StragglerFound, slow)]
    assert isinstance(found[0], StragglerFound) and found[0].own > 1.4 > 1.2 > found[0].usual
    assert run(book, [step(300 + number, 1.0) for number in range(STEPS - 1)]) == []
    assert run(book, [step(400, 1.6)]) == [], "not recovered yet"
    over = run(book, [step(500 + number, 1.0) for number in range(3 * STEPS)])
    assert over == [StragglerOver(slow)]


def test_the_first_steps_of_a_membership_and_missing_times_say_nothing() -> None:
    book = SlowRanks(2)
    times = {Rank(0): 1.0, Rank(1): 1.0, Rank(2): 9.0}
    assert run(book, [times] * (FIRST_STEPS + 1)) == []
    book.begin()
    assert run(book, [times] * (FIRST_STEPS + 1)) == []
    assert [type(each) for each in run(book, [times])] == [StragglerFound]
    alone = SlowRanks(1)
    assert [alone.apply(Rank(2), 9.0, 3) for _ in range(50)] == [[]] * 50


# --- in a job --------------------------------------------------------------------------------------------------------


def step_of(job: Job, step: int, own: dict[int, float], micro: dict[int, int] | None = None) -> None:
    """All ranks commit a step, and their agents tell of it. `micro`: who has how many micro-batches."""
    generation = job.machine.generation
    for rank, seconds in own.items():
        worker = job.of(rank)
        commit = facts.WorkerCommitted(worker, generation, StepNo(step), job.now, 0.1, rank=Rank(rank), own=seconds)
        commit = msgspec.structs.replace(commit, parts=[BatchRecord(0, 1)] * (micro or {}).get(rank, 0))
        job.tell(facts.NodeProgress(job.machine.roster.workers[worker].node, [commit]))


def slowed(job: Job, rank: int, steps: range, factor: float = 2.0) -> None:
    for step in steps:
        step_of(job, step, {each: 0.1 * (factor if each == rank else 1.0) for each in job.ranks})


def verdicts(job: Job) -> list[tuple[str, str, str]]:
    return [(each.node, each.severity, each.source) for each in job.all(NodeJudged)]


def running(world: int = 4, **changes: Any) -> Job:
    return Job(world, straggler_steps=STEPS, **changes).trained(4)


def test_a_straggler_is_a_suspect_and_goes_on() -> None:
    job = running(nodes=2)
    slowed(job, 3, range(5, 40))
    assert verdicts(job) == [("n1", "suspect", "straggler")]
    told = job.last(NodeJudged)
    assert "rank 3 has taken 200 ms of its own for what takes the others 100 ms, 6 times in a row" in told.evidence
    assert (told.device, told.action, told.occasion) == ("slot1", "none", "in training")
    assert not job.all(orders.FenceWorker) and not job.all(orders.HaltGeneration) and not job.all(orders.StopNode)
    assert any("straggler" in text for node in job.machine.snapshot().nodes for text in node.verdicts)
    slowed(job, 3, range(40, 60), 1.0)
    assert verdicts(job)[1:] == [("n1", "ok", "straggler")]
    assert not any(node.verdicts for node in job.machine.snapshot().nodes)


def test_a_rank_that_is_slow_during_an_incident_is_not_named_and_one_that_is_replaced_is_forgotten() -> None:
    job = running()
    slowed(job, 3, range(5, 5 + STEPS + FIRST_STEPS - 1))
    mend(job, 1, 5 + STEPS + FIRST_STEPS)
    slowed(job, 3, range(20, 20 + STEPS + FIRST_STEPS - 1))
    assert verdicts(job) == []
    slowed(job, 3, range(40, 60))
    assert verdicts(job) == [("n0", "suspect", "straggler")]
    mend(job, 3, 60)
    slowed(job, 3, range(61, 80), 1.0)
    assert verdicts(job)[1:] == [("n0", "ok", "straggler")]
    assert "another worker has its rank" in job.last(NodeJudged).evidence


def test_nobody_looks_where_that_is_switched_off_or_own_times_are_not_known() -> None:
    off = Job(4, straggler_steps=0).trained(4)
    slowed(off, 3, range(5, 60))
    unknown = running()
    slowed(unknown, 3, range(5, 60), 0.0)
    assert verdicts(off) == verdicts(unknown) == []


def test_only_ranks_at_the_same_place_of_their_replicas_are_compared() -> None:
    job = running(8, unit=2)
    for step in range(5, 60):
        step_of(job, step, {rank: 0.1 + 0.9 * (rank % 2) + (0.5 if rank == 4 else 0.0) for rank in job.ranks})
    assert ["rank 4 " in each.evidence for each in job.all(NodeJudged)] == [True]


def test_who_has_more_micro_batches_is_not_slower() -> None:
    job, share = running(3), {0: 2, 1: 2, 2: 3}
    for step in range(5, 60):
        step_of(job, step, {rank: 0.1 * count for rank, count in share.items()}, share)
    assert verdicts(job) == []


def test_its_node_is_replaced_where_that_is_asked_for_and_a_spare_has_room() -> None:
    job = Job(6, nodes=3, spares=1, straggler_steps=STEPS, replace_stragglers=True).trained(4)
    slowed(job, 3, range(5, 20))
    roster = job.machine.roster
    assert roster.nodes[NodeId("n1")].leave_by is not None and roster.nodes[NodeId("n0")].leave_by is None
    assert not job.all(orders.FenceWorker), "its ranks leave at a boundary"
    assert any("rank 3 is a straggler" in each.text for each in job.all(Noted))


@pytest.mark.parametrize("replace", [False, True])
def test_it_stays_where_nobody_asked_or_no_other_node_has_room(replace: bool) -> None:
    job = running(nodes=2, replace_stragglers=replace)
    slowed(job, 3, range(5, 40))
    assert all(node.leave_by is None for node in job.machine.roster.nodes.values())
    assert any("no other node has room" in each.text for each in job.all(Noted)) is replace
