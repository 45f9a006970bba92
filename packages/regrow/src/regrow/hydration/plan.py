"""Plan of a transfer: which holder sends which bytes. Pure: no sockets, no tensors, no clock."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

CHUNK_BYTES = 1 << 20
"""Most bytes under one checksum. Small enough to stay in a core's cache between the copy and its checksum."""
SMALL_BYTES = 64 << 10
"""Ranges smaller than this share a chunk, so that thousands of tiny tensors cost no more than a few large ones."""
LEAST_PART, MOST_PART = 4 << 20, 64 << 20
"""Least and most bytes that a flow requests at once: large enough to be efficient, small enough for slow flows."""
_MUCH_SLOWER = 0.25


class Sized(Protocol):
    """A tensor as the plan uses it: its name and its size."""

    @property
    def name(self) -> str:
        """Name of the tensor on both sides."""
        ...

    @property
    def nbytes(self) -> int:
        """Size of the tensor in bytes."""
        ...


class ByteSpan(NamedTuple):
    """Contiguous bytes of one tensor."""

    name: str
    offset: int
    length: int


Chunk = tuple[ByteSpan, ...]
"""Spans that share one checksum."""


def whole(entries: Iterable[Sized]) -> list[ByteSpan]:
    """All bytes of all tensors, in order, as spans; tensors without elements have none."""
    return [ByteSpan(entry.name, 0, entry.nbytes) for entry in entries if entry.nbytes]


def chunked(spans: Iterable[ByteSpan], size: int = CHUNK_BYTES) -> list[Chunk]:
    """Divide spans into chunks in the order of sending: large spans are cut, then small ones share a chunk.

    Both ends compute it from the same list.
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


class FlowDealer:
    """Distributes bytes over flows on request, in parts that become smaller towards the end.

    A flow's part is proportional to its rate. A flow that is much slower than the fastest gets nothing once the others
    can finish without it, because all would wait for its last part.
    """

    def __init__(self, spans: Sequence[ByteSpan]) -> None:
        self._spans = list(reversed(spans))
        self._left = sum(span.length for span in spans)

    def first(self, flows: int, most: int) -> list[list[ByteSpan]]:
        """A contiguous part for each flow before any rate is known: `most` bytes each, or all bytes in equal parts."""
        size = min(self._left, most * flows)
        return [self._next(size * (at + 1) // flows - size * at // flows) for at in range(flows)]

    def take(self, rate: float, others: Sequence[float]) -> list[ByteSpan]:
        """Take bytes for a flow of this rate, given the other flows' rates; 0 means that a rate is not known yet.

        A flow of unknown rate gets the least part, and counts with the mean rate for the others.
        """
        known = [each for each in (rate, *others) if each > 0]
        mean = sum(known) / len(known) if known else 1.0
        mine, theirs = rate or mean, [other or mean for other in others]
        slow = mine < _MUCH_SLOWER * max(theirs, default=0.0)
        if slow and min(LEAST_PART, self._left) / mine > self._left / sum(theirs):
            return []
        share = self._left * mine / (mine + sum(theirs)) / 2 if rate else 0.0
        return self._next(int(max(LEAST_PART, min(share, MOST_PART))))

    def rest(self) -> list[ByteSpan]:
        """All bytes that no flow has taken."""
        return self._next(self._left)

    def _next(self, size: int) -> list[ByteSpan]:
        taken: list[ByteSpan] = []
        while self._spans and size > 0:
            name, offset, length = self._spans.pop()
            here = min(length, size)
            taken.append(ByteSpan(name, offset, here))
            if here < length:
                self._spans.append(ByteSpan(name, offset + here, length - here))
            size -= here
            self._left -= here
        return taken
