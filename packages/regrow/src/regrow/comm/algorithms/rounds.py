"""Rounds of a collective and the partners in each, so that a large group needs few connections. Pure.

In groups of up to `DIRECT` ranks each speaks to each, in one round, or on one machine with large tensors to one
partner after the other (`pairwise.py`). In larger ones a power of two of ranks, the core,
is a hypercube: in round k a rank speaks to the one whose number differs in bit k, so each has log2 of the core's size
peers, the same in all operations. Every rank beyond the core goes through one of the core, its host.
"""

from collections.abc import Iterator
from dataclasses import dataclass

DIRECT = 16
"""Up to this many ranks, one round to all others is faster than several to some."""
PAIRED, PAIRED_BYTES = 4, 8 << 20
"""Ranks and bytes of all parts from which one partner after the other is faster than one round to all others."""


@dataclass(frozen=True)
class Rounds:
    """The rounds of one rank.

    Args:
        rank: of the group.
        size: ranks in the group.
        most_direct: up to how many ranks each speaks to each.
        one_machine: whether all ranks are on one.
    """

    rank: int
    size: int
    most_direct: int = DIRECT
    one_machine: bool = False

    @property
    def direct(self) -> bool:
        """True if each rank speaks to each."""
        return self.size <= self.most_direct

    def paired(self, whole: int) -> bool:
        """True if each rank goes to one partner after the other, for parts that together have `whole` bytes.

        Between machines each step would wait for one delay of the network, and there are many.
        """
        return self.one_machine and self.direct and self.size >= PAIRED and whole >= PAIRED_BYTES

    @property
    def core(self) -> int:
        """Ranks of the hypercube: the largest power of two that is not above the group's size."""
        return 1 << (self.size.bit_length() - 1)

    @property
    def host(self) -> int | None:
        """Through which rank this one goes; None for one of the core."""
        return self.rank - self.core if self.rank >= self.core else None

    @property
    def guest(self) -> int | None:
        """Rank that goes through this one; None: none does."""
        return self.rank + self.core if self.rank + self.core < self.size else None

    @property
    def peers(self) -> list[int]:
        """In the core: those of the rounds, from bit 0 upwards."""
        return [self.rank ^ bit for bit in self.bits]

    @property
    def bits(self) -> list[int]:
        """1, 2, 4 and so on, below the size of the core."""
        return [1 << at for at in range(self.core.bit_length() - 1)]

    def with_guests(self, cores: range) -> list[int]:
        """Ranks of the core and those that go through them, the core's first."""
        return [*cores, *(rank + self.core for rank in cores if rank + self.core < self.size)]

    def gathered(self) -> Iterator[tuple[int, range, range]]:
        """Rounds that double what each has: the peer, whose parts this rank has by then, and whose the peer has."""
        for bit in self.bits:
            mine = self.rank & ~(bit - 1)
            yield self.rank ^ bit, range(mine, mine + bit), range(mine ^ bit, (mine ^ bit) + bit)

    def halved(self) -> Iterator[tuple[int, range, range]]:
        """Rounds that halve what each goes on with: the peer, whose parts this rank keeps, and whose the peer keeps."""
        for bit in reversed(self.bits):
            mine = self.rank & ~(bit - 1)
            yield self.rank ^ bit, range(mine, mine + bit), range(mine ^ bit, (mine ^ bit) + bit)

    def spread(self, root: int) -> tuple[int | None, list[int]]:
        """A broadcast in the core, from the root or its host: from whom it comes, and to whom it goes on, in order."""
        start = root - self.core if root >= self.core else root
        distance = self.rank ^ start
        first = distance.bit_length()
        source = self.rank ^ (1 << (first - 1)) if distance else None
        return source, [self.rank ^ bit for bit in self.bits[first:]]
