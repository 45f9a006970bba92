from collections import Counter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from regrow.hydration.inventory import TensorEntry
from regrow.hydration.plan import ByteSpan, FlowDealer, chunked, whole

sizes = st.lists(st.integers(0, 5000), max_size=30)


def entries(lengths: Any) -> Any:
    return [TensorEntry(f"t{at}", "uint8", (length,), length, "cpu") for at, length in enumerate(lengths)]


@given(sizes, st.integers(1, 5), st.integers(1, 200_000))
def test_the_first_parts_are_equal_and_contiguous_and_every_byte_is_dealt_once(
    lengths: Any, count: Any, most: Any
) -> None:
    dealer = FlowDealer(whole(entries(lengths)))
    parts = dealer.first(count, most)
    loads = [sum(span.length for span in part) for part in parts]
    assert len(parts) == count
    assert max(loads) - min(loads) <= 1
    assert sum(loads) == min(sum(lengths), most * count)
    every = [
        (s.name, at) for part in (*parts, dealer.rest()) for s in part for at in range(s.offset, s.offset + s.length)
    ]
    assert every == [(f"t{at}", byte) for at, length in enumerate(lengths) for byte in range(length)]


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
