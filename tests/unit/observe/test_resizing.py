"""Measures that `benchmarks/elastic.py` takes from records: one definition of a pause for every side."""

import msgspec
import pytest
from resizing import changes_of, changes_told, extra_memory, rates_by_world, turns

from regrow.core.ids import Generation, Rank, StepNo, WorkerId
from regrow.core.records import IncidentClosed, StepCommitted
from regrow.observe.ledger import Ledger


def commits(steps: range, world: int, *, start: float, generation: int, **metrics: float) -> list[StepCommitted]:
    """All ranks' commits of steps of half a second, the last rank's 0.05 s after the others'; from `start` on."""
    found = []
    for number, step in enumerate(steps):
        for rank in range(world):
            at = start + 0.5 * (number + 1) + (0.05 if rank == world - 1 > 0 else 0.0)
            worker = WorkerId(f"w{rank}")
            place = (StepNo(step), Rank(rank), worker, Generation(generation), 0.5)
            found.append(StepCommitted(at, *place, {"tokens": 12 / world, **metrics}))
    return found


def closed(generation: int, before: int, after: int, total: float) -> IncidentClosed:
    kind = "grow" if after > before else "shrink"
    stages = (0.0, 0.1, 0.1, 0.1, 0.5, total)
    place = (1, Generation(generation), StepNo(10), kind, list[Rank](), "asked")
    return IncidentClosed(9.0, *place, kind, 0, *stages, 0, 300, 1.0, 1.0, before, after)


def test_a_restart_from_a_checkpoint_pauses_until_it_is_beyond_the_last_step_and_counts_what_it_runs_again() -> None:
    old = commits(range(0, 10), 2, start=0.0, generation=2)
    new = commits(range(7, 20), 4, start=20.0, generation=4)
    (change,) = changes_of(Ledger([*old, *new]))
    assert (change.before, change.after, change.redone) == (2, 4, 3)
    assert change.step == pytest.approx(0.5)
    # From step 9 at 5.05 s to step 10, the fourth of the new world, at 22.05 s; one step of it is no loss.
    assert change.pause == pytest.approx(22.05 - 5.05 - 0.5)
    assert change.told == change.pause


def test_a_step_that_not_all_of_the_old_world_had_is_not_committed() -> None:
    old = commits(range(0, 10), 2, start=0.0, generation=2)[:-1]
    new = commits(range(9, 20), 4, start=20.0, generation=4)
    (change,) = changes_of(Ledger([*old, *new]))
    assert change.redone == 0
    assert change.pause == pytest.approx(20.55 - 4.55 - 0.5)


def test_a_change_that_is_still_behind_is_none_yet() -> None:
    old = commits(range(0, 10), 2, start=0.0, generation=2)
    new = commits(range(5, 9), 4, start=20.0, generation=4)
    assert changes_of(Ledger([*old, *new])) == []


def test_a_pause_is_told_by_the_record_and_seen_by_rank_0() -> None:
    old = commits(range(0, 10), 2, start=0.0, generation=3)
    new = commits(range(10, 20), 4, start=5.3, generation=4)
    (change,) = changes_told(Ledger([*old, *new, closed(4, 2, 4, 0.85)]))
    assert change.pause == pytest.approx(0.3)
    assert change.told == pytest.approx(0.35)
    assert change.still == pytest.approx(0.3), "all of it before the step, which took half a second"
    assert change.redone == 0


def test_a_median_step_is_one_before_newcomers_build_beside_it() -> None:
    old = commits(range(0, 10), 2, start=0.0, generation=3)
    new = commits(range(10, 20), 1, start=5.3, generation=4)
    slow = [
        msgspec.structs.replace(each, at=30.0 + each.at * 3)
        for each in commits(range(20, 60), 1, start=0.0, generation=4)
    ]
    (change,) = changes_told(Ledger([*old, *new, *slow, closed(4, 2, 1, 0.85)]))
    assert change.step == pytest.approx(0.5)


def test_incidents_that_leave_the_size_alone_are_no_changes() -> None:
    old = commits(range(0, 10), 2, start=0.0, generation=3)
    new = commits(range(10, 20), 2, start=5.3, generation=4)
    assert changes_told(Ledger([*old, *new, closed(4, 0, 0, 0.85)])) == []


def test_rates_are_of_all_ranks_of_a_world_together() -> None:
    one = commits(range(0, 20), 1, start=0.0, generation=1)
    four = commits(range(20, 40), 4, start=20.0, generation=2)
    assert rates_by_world(Ledger([*one, *four])) == {1: pytest.approx(24.0), 4: pytest.approx(24.0)}


def test_blocks_of_each_mode_are_compared_without_their_first_step() -> None:
    found, now = [], 0.0
    for step in range(16):
        invariant = step // 4 % 2
        now += 9.0 if step % 4 == 0 else 0.6 if invariant else 0.5
        peak = 1000.0 + (50.0 if step > 4 else 0.0)
        metrics = {"invariant": float(invariant), "peak": peak, "tokens": 1.0}
        place = (StepNo(step), Rank(0), WorkerId("w0"), Generation(1), 0.5)
        found.append(StepCommitted(now, *place, metrics))
    usual, invariant_mode = turns(Ledger(found), 4)
    assert usual == pytest.approx([0.5, 0.5])
    assert invariant_mode == pytest.approx([0.6, 0.6])
    assert extra_memory(Ledger(found), 4) == 50.0
