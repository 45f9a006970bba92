"""Deals micro-batches to replicas, and defines the one tree in which their gradients are summed. Pure.

The tree over the micro-batches 0 .. M-1 is fixed by M alone: a node of n micro-batches has the largest power of two
below n on its left, the rest on its right. So all aligned blocks of 2^k micro-batches are nodes, as in a binary
counter, and the blocks left over at the end are added from the smallest up: for 7 it is ((0 1)(2 3))((4 5)6).

A replica's share is a range, and need not be a node; the largest nodes inside it are its *partial nodes*. Adding the
partial nodes of all replicas along the rest of the tree gives the sum that one replica alone would have got.
"""

import operator
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Generic, NamedTuple, TypeVar

from regrow.core.errors import UsageError
from regrow.step.policy import row_of

T = TypeVar("T")


class MicroBatchRange(NamedTuple):
    """Micro-batches `start` .. `stop - 1`."""

    start: int
    stop: int


def refusal(count: int, replicas: int) -> str | None:
    """Reason why `count` micro-batches cannot be dealt to this number of replicas; None if they can."""
    if count < 1:
        return f"a step of {count} micro-batches has nothing to compute"
    if replicas < 1:
        return f"a world of {replicas} replicas has no ranks to compute"
    if count < replicas:
        return f"{count} micro-batches a step are too few for {replicas} replicas: each needs at least one"
    return None


class MicroBatchCounts:
    """Number of micro-batches in a step.

    Args:
        counts: the number, or a table of numbers by replicas. A size that is not in the table uses the row of the next
            smaller size, else of the smallest.

    Attributes:
        all: every number that a step may have.
        fixed: the number, if it is the same for all sizes.
        most: largest possible number of replicas.

    Raises:
        UsageError: there is no row, or a row has fewer micro-batches than a size that uses it has replicas.
    """

    def __init__(self, counts: int | Mapping[int, int]) -> None:
        table = {1: counts} if isinstance(counts, int) else dict(counts)
        if not table:
            raise UsageError("the table of micro-batches is empty", hint="give {replicas: micro-batches of a step}")
        sizes = sorted(table)
        if sizes[0] < 1:
            raise UsageError(f"a table has a row for {sizes[0]} replicas", hint="sizes are 1 or more")
        for size, following in zip(sizes, [*(each - 1 for each in sizes[1:]), sizes[-1]], strict=True):
            reason = refusal(table[size], 1) or refusal(table[size], size) or refusal(table[size], following)
            if reason is not None:
                rows = f"raise the row for {size}, or add one for {following}"
                hint = "set microbatches= to 1 or more" if isinstance(counts, int) else rows
                raise UsageError(reason, hint=hint)
        self._table = table
        self.all = sorted(set(table.values()))
        self.fixed = self.all[0] if len(self.all) == 1 else None
        self.most = table[sizes[-1]]

    def of(self, replicas: int) -> int:
        """Number of micro-batches of a step in a world of this number of replicas."""
        return row_of(self._table, replicas)


def deal(count: int, replicas: int, replica: int) -> MicroBatchRange:
    """The share of one replica: a range; the first replicas have one more if the number does not divide evenly.

    Raises:
        UsageError: there are fewer micro-batches than replicas, or there is no such replica.
    """
    reason = refusal(count, replicas)
    if reason is not None:
        raise UsageError(reason, hint="raise microbatches=, or run fewer replicas")
    if not 0 <= replica < replicas:
        raise UsageError(f"there is no replica {replica} of {replicas}", hint="replicas are numbered from 0")
    each, more = divmod(count, replicas)
    start = replica * each + min(replica, more)
    return MicroBatchRange(start, start + each + (replica < more))


def middle(span: MicroBatchRange) -> int:
    """Point where a node of more than one micro-batch is split into its two children."""
    size = span.stop - span.start
    return span.start + (1 << ((size - 1).bit_length() - 1))


@lru_cache(maxsize=1 << 14)
def is_node(count: int, span: MicroBatchRange) -> bool:
    """True if these are all micro-batches below one node of the tree over `count`."""
    at = MicroBatchRange(0, count)
    while at != span:
        if at.stop - at.start < 2:
            return False
        split = middle(at)
        if span.stop <= split:
            at = MicroBatchRange(at.start, split)
        elif span.start >= split:
            at = MicroBatchRange(split, at.stop)
        else:
            return False
    return True


def partial_nodes(count: int, share: MicroBatchRange) -> list[MicroBatchRange]:
    """The largest nodes of the tree over `count` inside `share`, in order: at most 2 log2 of the share's length."""
    found: list[MicroBatchRange] = []

    def look(at: MicroBatchRange) -> None:
        if share.start <= at.start and at.stop <= share.stop:
            found.append(at)
        elif share.start < at.stop and at.start < share.stop:
            split = middle(at)
            look(MicroBatchRange(at.start, split))
            look(MicroBatchRange(split, at.stop))

    look(MicroBatchRange(0, count))
    return found


@lru_cache(maxsize=64)
def partial_nodes_of_all(count: int, replicas: int) -> tuple[tuple[MicroBatchRange, ...], ...]:
    """The partial nodes of each replica's share. Raises what `deal` raises."""
    return tuple(tuple(partial_nodes(count, deal(count, replicas, replica))) for replica in range(replicas))


def fold(count: int, found: Mapping[MicroBatchRange, T], add: Callable[[T, T], T]) -> T:
    """Value of the root of the tree over `count` micro-batches, from values of nodes that together cover the tree.

    Args:
        found: values of nodes.
        add: returns the value of a node from those of its left and its right child.

    Raises:
        KeyError: a micro-batch is below none of the nodes.
    """

    def value(at: MicroBatchRange) -> T:
        if at in found:
            return found[at]
        if at.stop - at.start < 2:
            raise KeyError(at)
        split = middle(at)
        left = value(MicroBatchRange(at.start, split))
        return add(left, value(MicroBatchRange(split, at.stop)))

    return value(MicroBatchRange(0, count))


def total(values: "list[float]") -> float:
    """The sum of one value for each micro-batch, in the order of the tree."""
    leaves = {MicroBatchRange(at, at + 1): value for at, value in enumerate(values)}
    return fold(len(values), leaves, operator.add)


class Counter(Generic[T]):
    """Adds up a share, one micro-batch after another, like a binary counter.

    For a share of n micro-batches it keeps at most 2 log2(n) values at a time, or log2(n) if the share starts at a
    multiple of a power of two that is at least n.

    Args:
        count: micro-batches of the step.
        add: returns the value of a node from those of its children; it may write to the first.
    """

    def __init__(self, count: int, add: Callable[[T, T], T]) -> None:
        self._count, self._add = count, add
        self._kept: list[tuple[MicroBatchRange, T]] = []

    def neighbour(self, index: int) -> T | None:
        """Value to which the value of micro-batch `index` is added at once; None if that is kept separately."""
        if self._kept and is_node(self._count, MicroBatchRange(self._kept[-1][0].start, index + 1)):
            return self._kept[-1][1]
        return None

    def push(self, index: int, value: T, *, added: bool = False) -> None:
        """Add the next micro-batch's value, in order. `added`: `value` is its sum with its neighbour already."""
        span = MicroBatchRange(index, index + 1)
        if added:
            span = MicroBatchRange(self._kept.pop()[0].start, span.stop)
        while self._kept and is_node(self._count, MicroBatchRange(self._kept[-1][0].start, span.stop)):
            left, kept = self._kept.pop()
            span, value = MicroBatchRange(left.start, span.stop), self._add(kept, value)
        self._kept.append((span, value))

    @property
    def nodes(self) -> list[tuple[MicroBatchRange, T]]:
        """Sums until now: the partial nodes of the micro-batches pushed so far."""
        return list(self._kept)

    def clear(self) -> None:
        """Drop all values."""
        self._kept.clear()
