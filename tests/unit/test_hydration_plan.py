from collections import Counter, defaultdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.hydration.inventory import TensorEntry
from regrow.hydration.plan import ByteSpan, chunked, deal, whole

sizes = st.lists(st.integers(0, 5000), max_size=30)


def entries(lengths: Any) -> Any:
    return [TensorEntry(f"t{at}", "uint8", (length,), length, "cpu") for at, length in enumerate(lengths)]


@given(sizes, st.integers(1, 5))
def test_every_byte_goes_to_exactly_one_holder_in_equal_contiguous_parts(lengths: Any, count: Any) -> None:
    holders = [f"h{at}" for at in range(count)]
    ranges = deal(whole(entries(lengths)), holders)
    covered: defaultdict[str, list[int]] = defaultdict(list)
    for part in ranges:
        covered[part.name] += range(part.offset, part.offset + part.length)
    assert {name: len(at) for name, at in covered.items()} == {f"t{i}": n for i, n in enumerate(lengths) if n}
    assert all(at == list(range(len(at))) for at in covered.values())
    load = Counter({holder: 0 for holder in holders})
    for part in ranges:
        load[part.holder] += part.length
    assert max(load.values()) - min(load.values()) <= 1
    order = [part.holder for part in ranges]
    assert order == sorted(order)


def test_without_holders_there_is_no_plan() -> None:
    with pytest.raises(ValueError, match="nobody"):
        deal([ByteSpan("a", 0, 1)], [])


@given(sizes, st.sampled_from([64, 1000, 1 << 20]))
def test_chunks_carry_every_byte_once_and_stay_within_their_size(lengths: Any, size: Any) -> None:
    spans = whole(entries(lengths))
    chunks = chunked(spans, size)
    assert all(0 < sum(span.length for span in chunk) <= size for chunk in chunks)
    got = Counter((s.name, byte) for chunk in chunks for s in chunk for byte in range(s.offset, s.offset + s.length))
    assert got == Counter((s.name, byte) for s in spans for byte in range(s.length))


def test_thousands_of_tiny_tensors_share_a_few_chunks() -> None:
    assert len(chunked(whole(entries([4] * 5000 + [200_000])), 1 << 20)) == 2


def test_tensors_without_elements_are_not_asked_for() -> None:
    assert whole(entries([0, 3, 0])) == [ByteSpan("t1", 0, 3)]
