"""The order of a mixture: by weight, each source in its own epochs, any step at once."""

import time
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regrow.core.errors import UsageError
from regrow.core.messages.data import OrderSpec, SourceSpec
from regrow.data.mixture import MixtureOrder, Weighting
from regrow.data.order import keys_of, order_of, samples_digest, steps_per_epoch

Schedule = list[tuple[int, list[float]]]

weights = st.lists(st.integers(0, 50).map(float), min_size=3, max_size=3).filter(any)
schedules = st.lists(st.tuples(st.integers(1, 40), weights), max_size=3, unique_by=lambda entry: entry[0]).map(sorted)


def spec_of(sizes: list[int], schedule: Schedule, *, batch: int, shuffle: bool = True, seed: int = 7) -> OrderSpec:
    sources = [SourceSpec(f"s{i}", size) for i, size in enumerate(sizes)]
    return OrderSpec("mixture", seed, sources, global_batch=batch, shuffle=shuffle, remainder="wrap", weights=schedule)


def walked(spec: OrderSpec, steps: int) -> list[Any]:
    order = order_of(spec, 1)
    return [address for step in range(steps) for address in order.addresses(step)]


@settings(deadline=None, max_examples=40)
@given(
    sizes=st.lists(st.integers(1, 300), min_size=3, max_size=3),
    first=weights,
    later=schedules,
    batch=st.integers(1, 700),
    shuffle=st.booleans(),
    seed=st.integers(0, 2**64 - 1),
)
def test_each_source_is_read_epoch_after_epoch_without_gaps_whatever_the_weights_become(
    sizes: list[int], first: list[float], later: Schedule, batch: int, shuffle: bool, seed: int
) -> None:
    spec = spec_of(sizes, [(0, first), *later], batch=batch, shuffle=shuffle, seed=seed)
    read = walked(spec, 45)
    assert len(read) == 45 * batch
    for source, size in enumerate(sizes):
        mine = [(epoch, index) for epoch, (of, index) in read if of == source]
        for epoch in range(len(mine) // size + 1):
            part = mine[epoch * size : (epoch + 1) * size]
            assert [when for when, _ in part] == [epoch] * len(part)
            indices = [index for _, index in part]
            assert len(set(indices)) == len(indices)
            assert set(indices) <= set(range(size))
            if not shuffle:
                assert indices == list(range(len(indices)))


@settings(deadline=None, max_examples=40)
@given(batch=st.integers(40, 200), shares=st.integers(1, 40), step=st.integers(0, 10**9))
def test_the_shares_of_any_world_partition_the_same_batch(batch: int, shares: int, step: int) -> None:
    spec = spec_of([1000, 500], [(0, [0.7, 0.3])], batch=batch)
    whole = order_of(spec, 1).addresses(step)
    parts = [keys_of(spec, step, share, shares) for share in range(shares)]
    assert sorted(address for part in parts for address in part) == sorted(whole)
    assert len(set(whole)) == len(whole)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("shares", [[0.7, 0.3], [1.0], [3, 2, 1], [0.99, 0.01], [0.9999, 0.0001], [0, 1, 4]])
def test_the_samples_come_by_weight(shares: list[float]) -> None:
    spec = spec_of([10**6] * len(shares), [(0, list(map(float, shares)))], batch=512)
    read = Counter(source for _, (source, _) in walked(spec, 128))
    for source, weight in enumerate(shares):
        expected = weight / sum(shares) * 128 * 512
        assert abs(read[source] - expected) <= 0.05 * expected + 8


def test_a_batch_has_about_the_mixture_of_the_whole() -> None:
    order = order_of(spec_of([10**6] * 2, [(0, [0.5, 0.5])], batch=1024), 1)
    counts = [sum(source for _, (source, _) in order.addresses(step)) for step in range(200)]
    # Drawn one by one, the standard deviation would be 16; within one cycle of 4096 it is less.
    assert all(abs(count - 512) < 5 * 16 for count in counts)
    assert len(set(counts)) > 10


def test_weights_change_at_their_step() -> None:
    schedule: Schedule = [(0, [1, 0]), (10, [0, 1]), (20, [1, 1])]
    order = order_of(spec_of([100, 100], schedule, batch=32), 1)
    seen = [Counter(source for _, (source, _) in order.addresses(step)) for step in range(30)]
    assert all(count == {0: 32} for count in seen[:10])
    assert all(count == {1: 32} for count in seen[10:20])
    assert all(set(count) == {0, 1} for count in seen[20:])


def test_a_step_is_the_same_whatever_was_asked_before() -> None:
    schedule: Schedule = [(0, [3, 1]), (500, [1, 1]), (900, [1, 5])]
    spec = spec_of([1000, 70], schedule, batch=100)
    at_once = MixtureOrder([1000, 70], Weighting.of(["a", "b"], schedule), 100, seed=7, shuffle=True).addresses(1000)
    order = order_of(spec, 1)
    for step in (2000, 3, 899, 501, 0):
        order.addresses(step)
    assert order.addresses(1000) == at_once


def test_a_far_step_takes_no_longer_than_the_first() -> None:
    def seconds(step: int) -> float:
        spent = []
        for seed in range(7):
            order = MixtureOrder([10**7, 10**6], Weighting.of(["a", "b"], [(0, [2, 1])]), 1024, seed=seed, shuffle=True)
            begun = time.perf_counter()
            order.addresses(step)
            spent.append(time.perf_counter() - begun)
        return min(spent)

    seconds(1)
    # Walking there would take ten days.
    assert seconds(10**9) < 10 * seconds(0) + 0.05


def test_the_order_never_changes_between_versions() -> None:
    """Golden: a resumed job reads on where it stopped. If this fails, the order is wrong, not the test."""
    schedule: Schedule = [(0, [0.7, 0.3]), (1000, [0.2, 0.8]), (2000, [0.00001, 1.0])]
    for step, golden in GOLDEN.items():
        for shuffle in (True, False):
            spec = spec_of([12345, 678], schedule, batch=64, shuffle=shuffle, seed=2**64 - 5)
            assert samples_digest(order_of(spec, 1).addresses(step)) == golden[not shuffle]


def test_sources_and_seeds_have_orders_of_their_own() -> None:
    def orders(seed: int) -> list[list[int]]:
        read = walked(spec_of([500, 500], [(0, [1, 1])], batch=100, seed=seed), 8)
        return [[index for _, (of, index) in read if of == source][:300] for source in (0, 1)]

    one, other = orders(1), orders(2)
    assert one[0] != one[1]
    assert one != other


def test_a_mixture_has_no_steps_per_epoch() -> None:
    assert steps_per_epoch(spec_of([10, 10], [(0, [1, 1])], batch=4), 2) == 0


@pytest.mark.parametrize(
    ("schedule", "cause"),
    [
        ([], "no weights for step 0"),
        ([(5, [1, 1])], "no weights for step 0"),
        ([(0, [1, 1]), (9, [1, 1]), (9, [1, 2])], "from step 9 on come after those from step 9"),
        ([(0, [1, -1])], "weight of 'b' is -1"),
        ([(0, [1, float("nan")])], "weight of 'b' is nan"),
        ([(0, [1, 1]), (3, [0, 0])], "all weights of a mixture are 0 from step 3 on"),
        ([(0, [1])], "2 sources has 1 weights"),
        ([(0, [1, 1e-9])], "next to nothing"),
    ],
)
def test_weights_that_cannot_be_are_refused(schedule: Schedule, cause: str) -> None:
    with pytest.raises(UsageError, match=cause):
        Weighting.of(["a", "b"], schedule)


@pytest.mark.parametrize(
    ("sizes", "batch", "cause"), [([3, 0], 4, "source 1 .* is empty"), ([3, 3], 0, "is 0 samples")]
)
def test_a_mixture_without_a_batch_is_refused(sizes: list[int], batch: int, cause: str) -> None:
    with pytest.raises(UsageError, match=cause):
        MixtureOrder(sizes, Weighting.of(["a", "b"], [(0, [1, 1])]), batch, seed=0, shuffle=True)


GOLDEN = {
    0: ("7fcb796a3f96e611", "cc99a41baf57edc0"),
    999: ("0c9fe82bf2c9da05", "3edce9995554ef78"),
    1000: ("018f33c913a3b27e", "940337acb22e1b16"),
    1777: ("9a1ede9599387f29", "e2103cc28630e4ce"),
    2000: ("6d871f376ae70d32", "3eca043f0dbb7ee7"),
    1000000000: ("fb0ef162ee182666", "fbcb5e49e6ee51e9"),
}
