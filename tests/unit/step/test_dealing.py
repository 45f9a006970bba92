"""Micro-batches of a replica, and the tree in which their gradients are summed."""

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.core.errors import UsageError
from regrow.step.dealing import (
    Counter,
    MicroBatchCounts,
    MicroBatchRange,
    deal,
    fold,
    is_node,
    partial_nodes,
    refusal,
    total,
)

Tree = str | tuple["Tree", "Tree"]


def pair(left: Tree, right: Tree) -> Tree:
    return left, right


def tree(count: int) -> Tree:
    """Sum of one replica alone."""
    counter: Counter[Tree] = Counter(count, pair)
    for index in range(count):
        counter.push(index, str(index))
    ((span, whole),) = counter.nodes
    assert span == MicroBatchRange(0, count)
    return whole


@st.composite
def worlds(draw: Callable[..., int], most: int = 96) -> tuple[int, int]:
    count = draw(st.integers(1, most))
    return count, draw(st.integers(1, count))


@given(worlds())
def test_every_micro_batch_has_one_replica_and_the_shares_are_even(world: tuple[int, int]) -> None:
    count, replicas = world
    shares = [deal(count, replicas, replica) for replica in range(replicas)]
    assert [index for share in shares for index in range(*share)] == list(range(count))
    sizes = [share.stop - share.start for share in shares]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(("count", "replicas"), [(3, 4), (0, 1), (4, 0), (-1, 1)])
def test_what_cannot_be_dealt_is_refused_with_a_reason(count: int, replicas: int) -> None:
    reason = refusal(count, replicas)
    assert reason is not None
    with pytest.raises(UsageError, match=reason[:20]):
        deal(count, replicas, 0)


def test_three_micro_batches_are_too_few_for_four_replicas() -> None:
    assert refusal(3, 4) == "3 micro-batches a step are too few for 4 replicas: each needs at least one"
    assert refusal(4, 4) is None


@pytest.mark.parametrize(
    ("counts", "by_replicas", "most"),
    [
        (6, {1: 6, 4: 6, 6: 6}, 6),
        ({1: 8, 4: 16}, {1: 8, 3: 8, 4: 16, 16: 16}, 16),
        ({2: 4, 3: 8}, {1: 4, 2: 4, 3: 8, 8: 8}, 8),
        ({1: 8, 2: 4}, {1: 8, 2: 4, 4: 4}, 4),
    ],
)
def test_the_number_of_micro_batches_is_that_of_the_next_smaller_size(
    counts: int | dict[int, int], by_replicas: dict[int, int], most: int
) -> None:
    found = MicroBatchCounts(counts)
    assert {replicas: found.of(replicas) for replicas in by_replicas} == by_replicas
    assert found.most == most
    assert all(refusal(found.of(replicas), replicas) is None for replicas in range(1, most + 1))
    assert refusal(found.of(most + 1), most + 1) is not None


@pytest.mark.parametrize(
    ("counts", "why"),
    [
        (0, "a step of 0 micro-batches has nothing to compute .set microbatches= to 1 or more"),
        ({}, "the table of micro-batches is empty"),
        ({1: 8, 4: 3}, "3 micro-batches a step are too few for 4 replicas"),
        ({1: 2, 4: 16}, "2 micro-batches a step are too few for 3 replicas.*raise the row for 1, or add one for 3"),
        ({0: 4}, "a table has a row for 0 replicas"),
    ],
)
def test_a_table_with_too_few_micro_batches_for_a_size_is_refused(counts: int | dict[int, int], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        MicroBatchCounts(counts)


@given(worlds())
def test_a_value_may_be_added_to_its_neighbour_beforehand(world: tuple[int, int]) -> None:
    """In the neighbour's memory, while it is being computed: the tree stays the same."""
    count, replicas = world
    for replica in range(replicas):
        plain, early = Counter[Tree](count, pair), Counter[Tree](count, pair)
        for index in range(*deal(count, replicas, replica)):
            plain.push(index, str(index))
            neighbour = early.neighbour(index)
            early.push(index, str(index) if neighbour is None else (neighbour, str(index)), added=neighbour is not None)
        assert early.nodes == plain.nodes


def test_there_is_no_replica_beyond_the_last() -> None:
    with pytest.raises(UsageError, match="no replica 2 of 2"):
        deal(4, 2, 2)


def test_the_tree_is_that_of_a_binary_counter_with_leftovers_from_the_smallest_up() -> None:
    assert tree(8) == ((("0", "1"), ("2", "3")), (("4", "5"), ("6", "7")))
    assert tree(7) == ((("0", "1"), ("2", "3")), (("4", "5"), "6"))
    assert tree(11)[1] == (("8", "9"), "10")


@given(worlds())
def test_whoever_computes_them_the_micro_batches_are_summed_in_the_same_tree(world: tuple[int, int]) -> None:
    count, replicas = world
    found: dict[MicroBatchRange, Tree] = {}
    for replica in range(replicas):
        share = deal(count, replicas, replica)
        counter: Counter[Tree] = Counter(count, pair)
        for index in range(*share):
            counter.push(index, str(index))
        assert [span for span, _ in counter.nodes] == partial_nodes(count, share)
        found |= dict(counter.nodes)
    assert fold(count, found, pair) == tree(count)


@given(worlds())
def test_a_share_needs_no_more_values_than_it_says(world: tuple[int, int]) -> None:
    count, replicas = world
    for replica in range(replicas):
        share = deal(count, replicas, replica)
        length = share.stop - share.start
        counter: Counter[int] = Counter(count, int.__add__)
        for index in range(*share):
            kept = len(counter.nodes)  # beside the gradient that is being computed
            assert kept <= max(2 * math.floor(math.log2(length)), 0)
            if share.start == 0 or count <= 48:
                assert kept <= math.ceil(math.log2(count))
            counter.push(index, 1)
        assert len(counter.nodes) - 1 <= kept + 1


def test_nodes_are_known() -> None:
    assert is_node(8, MicroBatchRange(4, 6))
    assert is_node(7, MicroBatchRange(4, 7))
    assert not is_node(8, MicroBatchRange(1, 3))
    assert not is_node(8, MicroBatchRange(5, 5))


def test_a_hole_is_an_error() -> None:
    with pytest.raises(KeyError):
        fold(4, {MicroBatchRange(0, 2): 1, MicroBatchRange(3, 4): 1}, int.__add__)


def test_the_sum_follows_the_tree_and_not_the_order() -> None:
    values = [1e16, 1.0, 1.0, 1.0]
    assert total(values) == (1e16 + 1.0) + (1.0 + 1.0)
    assert total(values) != sum(values)


def test_a_counter_can_start_anew() -> None:
    counter: Counter[int] = Counter(4, int.__add__)
    counter.push(0, 1)
    counter.clear()
    counter.push(0, 5)
    assert counter.nodes == [(MicroBatchRange(0, 1), 5)]
