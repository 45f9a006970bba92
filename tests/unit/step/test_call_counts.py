"""A body that has called fewer collectives than all before asks the others; after a fault all ask once."""

import pytest

from regrow.core.ids import Generation
from regrow.step.call_counts import CallCounts


def body(counts: CallCounts, calls: int, *, generation: int = 1, size: int = 2, world: int = 2) -> bool:
    counts.begin(Generation(generation), world)
    for _ in range(calls):
        counts.called(size, world)
    asked = counts.must_vote()
    counts.called(2, world)  # after the update
    counts.completed()
    return asked


def rehearsed(calls: int) -> CallCounts:
    counts = CallCounts(Generation(1))
    counts.rehearse()
    for _ in range(calls):
        counts.called(2, 2)
    counts.must_vote()
    counts.completed()
    return counts


@pytest.mark.parametrize(
    ("calls", "asked"),
    [
        ([6, 6, 6], []),
        ([6, 0, 6], [1]),
        ([4, 6, 4, 6, 4], [0]),  # logs in each second step: one question, of all ranks at once
        ([8, 7, 7, 5, 6], [3]),
    ],
)
def test_fewer_than_ever_before_is_asked_about(calls: list[int], asked: list[int]) -> None:
    counts = rehearsed(6)
    assert [at for at, each in enumerate(calls) if body(counts, each)] == asked


def test_behind_a_fault_all_ask_once_whatever_they_knew_before() -> None:
    survivor, newcomer = rehearsed(6), CallCounts(None)
    body(survivor, 4)
    asked = [[body(each, calls, generation=2) for calls in (6, 6, 5, 5)] for each in (survivor, newcomer)]
    assert asked == [[True, False, True, False]] * 2


def test_collectives_of_smaller_groups_are_not_counted() -> None:
    counts = rehearsed(0)
    assert not body(counts, 3, size=3) and not body(counts, 0)


def test_none_at_all_behind_a_fault_is_wrong_even_where_all_agree_in_it_but_for_scripts_that_do_so() -> None:
    survivor, sparing, newcomer = rehearsed(6), rehearsed(6), CallCounts(None)
    for calls in (6, 6, 4):
        body(survivor, calls)
        body(sparing, 0 if calls == 4 else calls)
    for each, skipped in ((survivor, True), (sparing, False), (newcomer, False)):
        each.begin(Generation(2), 2)
        assert each.must_vote() and each.skipped is skipped
        each.begin(Generation(2), 2)
        each.called(2, 2)
        assert each.must_vote() and not each.skipped


def test_a_rank_that_is_left_alone_has_nobody_to_ask_and_need_not_reduce() -> None:
    counts = rehearsed(6)
    for _ in range(4):
        body(counts, 6)
    counts.begin(Generation(2), 1)
    assert not counts.must_vote() and not counts.skipped
    counts.completed()
    assert body(counts, 6, generation=3) and not body(counts, 6, generation=3)
