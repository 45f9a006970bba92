"""The order of samples: a bijection, dealt out without gaps, reachable at any step."""

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regrow.core.errors import UsageError
from regrow.core.messages.data import OrderSpec, SourceSpec
from regrow.data.order import (
    Address,
    GlobalOrder,
    dealt,
    keys_of,
    order_of,
    padded,
    samples_digest,
    shuffled,
    slice_for,
    steps_per_epoch,
)

sizes = st.integers(1, 2000)
seeds = st.integers(-(2**63), 2**64)


def ordered(
    size: int, *, seed: int = 0, batch_size: int = 0, global_batch: int = 0, remainder: str = "keep"
) -> OrderSpec:
    return OrderSpec(
        "ordered",
        0,
        [SourceSpec("text", size)],
        batch_size=batch_size,
        global_batch=global_batch,
        shuffle=True,
        remainder=remainder,
    )


@given(size=sizes, seed=seeds, epoch=st.integers(0, 1000))
def test_shuffling_loses_and_repeats_no_sample(size: int, seed: int, epoch: int) -> None:
    order = shuffled(np.arange(size, dtype=np.uint64), size=size, seed=seed, epoch=epoch)
    assert sorted(order.tolist()) == list(range(size))


@settings(deadline=None)
@given(size=sizes, batch=st.integers(1, 300), seed=seeds, shuffle=st.booleans(), drop_last=st.booleans())
def test_an_epoch_reads_every_sample_once(size: int, batch: int, seed: int, shuffle: bool, drop_last: bool) -> None:
    if drop_last and size < batch:
        return
    order = GlobalOrder(size, batch, seed, shuffle=shuffle, drop_last=drop_last)
    read = [index for step in range(order.steps_per_epoch) for index in order.indices(step)]
    assert len(read) == len(set(read))
    assert set(read) <= set(range(size))
    assert len(read) == (size - size % batch if drop_last else size)


@given(size=st.integers(1, 10**15), batch=st.integers(1, 64), seed=seeds, step=st.integers(0, 10**6))
def test_a_step_is_the_same_whatever_was_asked_before(size: int, batch: int, seed: int, step: int) -> None:
    walked = GlobalOrder(size, batch, seed)
    for earlier in range(max(0, step - 3), step):
        walked.indices(earlier)
    assert walked.indices(step) == GlobalOrder(size, batch, seed).indices(step)


@given(indices=st.lists(st.integers(0, 10**9), unique=True), world=st.integers(1, 40))
def test_slices_are_disjoint_and_cover_the_batch_in_any_world(indices: list[int], world: int) -> None:
    slices = [slice_for(indices, rank, world) for rank in range(world)]
    assert sorted(index for part in slices for index in part) == sorted(indices)
    assert max(map(len, slices)) - min(map(len, slices)) <= 1


@given(indices=st.lists(st.integers(0, 10**9), min_size=1), world=st.integers(1, 40))
def test_padding_gives_equal_shares_and_changes_no_even_batch(indices: list[int], world: int) -> None:
    even = padded(indices, world)
    assert len(even) % world == 0
    assert even[: len(indices)] == indices
    assert len(even) - len(indices) < world
    assert set(even) == set(indices)


@settings(deadline=None)
@given(size=st.integers(1, 200), batch=st.integers(1, 300), seed=seeds, start=st.integers(0, 50))
def test_wrapped_batches_are_full_and_read_epoch_after_epoch(size: int, batch: int, seed: int, start: int) -> None:
    order = GlobalOrder(size, batch, seed, wrap=True)
    count = -(-3 * size // batch) + 1
    read = [address for step in range(start, start + count) for address in order.addresses(step)]
    assert len(read) == count * batch
    first = start * batch
    for epoch in range(first // size, (first + len(read)) // size + 1):
        whole = shuffled(np.arange(size, dtype=np.uint64), size=size, seed=seed, epoch=epoch).tolist()
        there = [(epoch, index) for index in whole][max(0, first - epoch * size) :]
        assert [address for address in read if address[0] == epoch] == there[: max(0, first + len(read) - epoch * size)]


@settings(deadline=None)
@given(size=sizes, batch=st.integers(1, 300), shares=st.integers(1, 40), step=st.integers(0, 60), data=st.data())
def test_a_constant_global_batch_is_covered_by_any_number_of_shares(
    size: int, batch: int, shares: int, step: int, data: st.DataObject
) -> None:
    remainder = data.draw(st.sampled_from(["keep", "drop", "wrap"]))
    if batch < shares or (remainder == "drop" and size < batch):
        return
    spec = ordered(size, global_batch=batch, remainder=remainder)
    whole = order_of(spec, 1).addresses(step)
    parts = [keys_of(spec, step, share, shares) for share in range(shares)]
    assert order_of(spec, shares).addresses(step) == whole
    assert set().union(*map(set, parts)) == set(whole)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    # Only the short last batch of an epoch can be smaller than the number of shares: then some is read twice.
    assert sum(map(len, parts)) == max(len(whole), shares)


@pytest.mark.parametrize(("samples", "shares", "sizes"), [(10, 4, [3, 3, 2, 2]), (4, 4, [1] * 4), (3, 5, [1] * 5)])
def test_shares_of_a_constant_batch_differ_by_one_at_most(samples: int, shares: int, sizes: list[int]) -> None:
    assert [len(dealt(range(samples), share, shares, constant=True)) for share in range(shares)] == sizes


def test_shares_of_their_own_size_are_equal_where_the_last_batch_is_short() -> None:
    spec = ordered(10, batch_size=3)
    assert [len(keys_of(spec, 1, share, 3)) for share in range(3)] == [1, 1, 1]
    assert [len(keys_of(ordered(10, batch_size=2), 1, share, 3)) for share in range(3)] == [2, 2, 2]


def test_more_shares_than_samples_in_a_global_batch_are_refused() -> None:
    with pytest.raises(UsageError, match="global batch of 6 samples is less than the 8 shares") as refused:
        keys_of(ordered(100, global_batch=6), 0, 0, 8)
    assert refused.value.hint


@pytest.mark.parametrize(("remainder", "steps"), [("keep", 4), ("drop", 3), ("wrap", 0)])
def test_how_long_an_epoch_is(remainder: str, steps: int) -> None:
    assert steps_per_epoch(ordered(31, global_batch=10, remainder=remainder), 3) == steps
    assert steps_per_epoch(ordered(31, batch_size=5, remainder=remainder), 2) == steps


@pytest.mark.parametrize(
    "spec", [OrderSpec("opaque", 3), OrderSpec("ordered", 3), ordered(10, batch_size=2, remainder="most")]
)
def test_an_order_that_nobody_can_recompute_is_refused(spec: OrderSpec) -> None:
    with pytest.raises(UsageError):
        keys_of(spec, 0, 0, 1)


def test_a_digest_names_samples_and_their_order() -> None:
    """Golden: a record is compared with what a later version recomputes."""
    one: list[Address] = [(0, 5), (0, 7), (1, 0)]
    assert samples_digest(one) == GOLDEN_SAMPLES
    assert samples_digest([(0, (1, 5)), (2**40, (0, 2**50))]) == GOLDEN_MIXED
    others: list[list[Address]] = [
        one[::-1],
        one[:2],
        [(0, 5), (0, 7), (0, 0)],
        [*one, (1, 1)],
        [(0, "a.txt")],
        [(0, "b.txt")],
        [],
    ]
    assert len({samples_digest(other) for other in [one, *others]}) == len(others) + 1


@pytest.mark.parametrize("index", [np.int64(7), np.uint8(7), True + 6])
def test_a_digest_does_not_depend_on_the_type_of_a_number(index: object) -> None:
    assert samples_digest([(0, index)]) == samples_digest([(0, 7)])


@pytest.mark.parametrize("index", [2**70, -1, ("shard", 3)])
def test_any_index_has_a_digest(index: object) -> None:
    assert len(samples_digest([(0, index)])) == 16


def test_each_epoch_has_an_order_of_its_own() -> None:
    order = GlobalOrder(1000, 1000, seed=3)
    assert order.indices(0) != order.indices(1)
    assert order.indices(0) != GlobalOrder(1000, 1000, seed=4).indices(0)
    assert order.addresses(1)[0][0] == 1


def test_every_sample_comes_to_every_place_about_equally_often() -> None:
    size, draws = 10, 4000
    counts = np.zeros((size, size))
    for seed in range(draws):
        order = shuffled(np.arange(size, dtype=np.uint64), size=size, seed=seed, epoch=0)
        counts[np.arange(size), order.astype(np.int64)] += 1
    expected = draws / size
    # Chi-squared with (10 - 1)**2 = 81 degrees of freedom: 1 in 10^6 shuffles that are fair would exceed 151.
    assert ((counts - expected) ** 2 / expected).sum() < 151


def test_the_order_never_changes_between_versions() -> None:
    """Golden: a resumed job reads on where it stopped. If this fails, the order is wrong, not the test."""
    assert GlobalOrder(10, 10, seed=0).indices(0) == GOLDEN_10
    assert GlobalOrder(10**12, 4, seed=42).indices(7) == GOLDEN_LARGE
    assert GlobalOrder(1001, 100, seed=-1).indices(25)[:5] == GOLDEN_EPOCH_2
    text = repr([GlobalOrder(5000, 5000, seed=seed).indices(1) for seed in range(4)])
    assert hashlib.sha256(text.encode()).hexdigest() == GOLDEN_DIGEST


def test_unshuffled_slices_are_those_of_torchs_distributed_sampler() -> None:
    from torch.utils.data import DistributedSampler

    order = GlobalOrder(96, 12, seed=0, shuffle=False)
    for rank in range(4):
        sampler: DistributedSampler[int] = DistributedSampler(range(96), 4, rank, shuffle=False)  # type: ignore[arg-type]
        ours = [index for step in range(8) for index in slice_for(order.indices(step), rank, 4)]
        assert ours == list(sampler)


@pytest.mark.parametrize(
    ("size", "batch", "drop_last", "cause"),
    [(0, 4, False, "0 samples"), (3, 4, True, "less than one global batch of 4"), (3, 0, False, "global batch is 0")],
)
def test_an_order_without_a_batch_is_refused(size: int, batch: int, drop_last: bool, cause: str) -> None:
    with pytest.raises(UsageError, match=cause) as refused:
        GlobalOrder(size, batch, seed=0, drop_last=drop_last)
    assert refused.value.hint


def test_places_that_do_not_exist_are_refused() -> None:
    with pytest.raises(UsageError, match="rank 4 is no place in a world of 4"):
        slice_for([1, 2, 3], 4, 4)
    with pytest.raises(UsageError, match="no step -1"):
        GlobalOrder(10, 2, seed=0).indices(-1)
    with pytest.raises(UsageError, match="batch is empty"):
        padded([], 2)


GOLDEN_10 = [8, 0, 9, 4, 6, 3, 1, 5, 7, 2]
GOLDEN_LARGE = [879719174940, 306146677790, 451739674329, 720362936239]
GOLDEN_EPOCH_2 = [294, 464, 592, 642, 722]
GOLDEN_DIGEST = "99e2512ef42fb3be1ed0b9b1e671d52caea93d090a5092ed7ceb5dc51db73228"
GOLDEN_SAMPLES = "43510bf7a8192341"
GOLDEN_MIXED = "89c95cbc0a5df6bd"
