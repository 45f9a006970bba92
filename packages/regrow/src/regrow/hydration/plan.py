"""Plan of a transfer: which holder sends which bytes. Pure: no sockets, no tensors, no clock."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

CHUNK_BYTES = 1 << 20
"""The most that one checksum covers. Small enough to stay in a core's cache between the copy and its checksum."""
SMALL_BYTES = 64 << 10
"""Ranges below this share a chunk: thousands of tiny tensors then cost no more than a few large ones."""


class Sized(Protocol):
    """A tensor as far as a plan goes: its name and its bytes."""

    @property
    def name(self) -> str:
        """Name on both sides."""
        ...

    @property
    def nbytes(self) -> int:
        """Number of its bytes."""
        ...


class ByteSpan(NamedTuple):
    """Contiguous bytes of one tensor."""

    name: str
    offset: int
    length: int


class ReadRange(NamedTuple):
    """Bytes of one tensor that one holder sends."""

    holder: str
    name: str
    offset: int
    length: int

    @property
    def span(self) -> ByteSpan:
        """The bytes, whoever sends them."""
        return ByteSpan(self.name, self.offset, self.length)


Chunk = tuple[ByteSpan, ...]
"""Spans under one checksum."""


def whole(entries: Iterable[Sized]) -> list[ByteSpan]:
    """All bytes of all tensors, in order; tensors without elements have none."""
    return [ByteSpan(entry.name, 0, entry.nbytes) for entry in entries if entry.nbytes]


def deal(spans: Sequence[ByteSpan], holders: Sequence[str]) -> list[ReadRange]:
    """Every byte of `spans` to exactly one holder, each a contiguous part, equal to within one byte.

    Raises `ValueError` without holders.
    """
    if not holders:
        raise ValueError("nobody to deal the ranges to")
    total = sum(span.length for span in spans)
    shares = [total * (at + 1) // len(holders) - total * at // len(holders) for at in range(len(holders))]
    ranges: list[ReadRange] = []
    turn = 0
    for span in spans:
        offset, left = span.offset, span.length
        while left:
            while not shares[turn]:
                turn += 1
            length = min(left, shares[turn])
            ranges.append(ReadRange(holders[turn], span.name, offset, length))
            offset, left = offset + length, left - length
            shares[turn] -= length
    return ranges


def chunked(spans: Iterable[ByteSpan], size: int = CHUNK_BYTES) -> list[Chunk]:
    """The order in which spans travel: large ones cut into chunks of their own, then the small ones, many to a chunk.

    Both ends work this out for themselves from the same list.
    """
    large: list[Chunk] = []
    small: list[ByteSpan] = []
    for span in spans:
        if span.length < min(SMALL_BYTES, size):
            small.append(span)
            continue
        end = span.offset + span.length
        large += [(ByteSpan(span.name, at, min(size, end - at)),) for at in range(span.offset, end, size)]
    shared: list[Chunk] = []
    group: list[ByteSpan] = []
    room = size
    for span in small:
        if span.length > room:
            shared.append(tuple(group))
            group, room = [], size
        group.append(span)
        room -= span.length
    if group:
        shared.append(tuple(group))
    return large + shared
