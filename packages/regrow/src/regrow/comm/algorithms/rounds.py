"""Rounds of a collective and the partners in each, so that a large group needs few connections. Pure.

In groups of up to `DIRECT` ranks each exchanges with each, in one round, or, for large tensors on one machine, with one
partner after the other (`pairwise.py`). In larger groups a power of two of ranks, the core, is a hypercube: in round k
a rank's partner is the rank whose number differs in bit k, so each rank has log2 of the core's size peers, the same in
all operations. Every rank beyond the core communicates through one rank of the core, its host.
"""

from collections.abc import Iterator
from dataclasses import dataclass

DIRECT = 16
"""Number of ranks up to which one round with all others is faster than several rounds with some."""
PAIRED, PAIRED_BYTES = 4, 8 << 20
"""Ranks, and bytes of all parts, from which one partner after the other is faster than one round with all others."""


@dataclass(frozen=True)
class Rounds:
    """The rounds of one rank.

    Args:
        rank: this worker's rank in the group.
        size: number of ranks in the group.
        most_direct: largest group size in which each rank exchanges with each.
        one_machine: whether all ranks are on one machine.
    """

    rank: int
    size: int
    most_direct: int = DIRECT
    one_machine: bool = False

    @property
    def direct(self) -> bool:
        """True if each rank exchanges directly with each."""
        return self.size <= self.most_direct

    def paired(self, whole: int) -> bool:
        """True if ranks should exchange `whole` bytes in all with one partner at a time, not with all others at once.

        Only for a large exchange among four ranks or more of one machine: between machines each step would be a delay.
        """
        return self.one_machine and self.direct and self.size >= PAIRED and whole >= PAIRED_BYTES

    @property
    def core(self) -> int:
        """Number of ranks in the hypercube: the largest power of two that is not above the group's size."""
        return 1 << (self.size.bit_length() - 1)

    @property
    def host(self) -> int | None:
        """The core rank that connects this rank to the others; None if this rank is in the core."""
        return self.rank - self.core if self.rank >= self.core else None

    @property
    def guest(self) -> int | None:
        """The rank beyond the core that communicates through this one; None if there is none."""
        return self.rank + self.core if self.rank + self.core < self.size else None

    @property
    def peers(self) -> list[int]:
        """Partners of this core rank in the rounds, from bit 0 upwards."""
        return [self.rank ^ bit for bit in self.bits]

    @property
    def bits(self) -> list[int]:
        """The powers of two below the size of the core: 1, 2, 4 and so on."""
        return [1 << at for at in range(self.core.bit_length() - 1)]

    def with_guests(self, cores: range) -> list[int]:
        """These ranks of the core, followed by the ranks that communicate through them."""
        return [*cores, *(rank + self.core for rank in cores if rank + self.core < self.size)]

    def gathered(self) -> Iterator[tuple[int, range, range]]:
        """Rounds that double the parts of each rank: the peer, this rank's parts so far, and the peer's parts."""
        for bit in self.bits:
            mine = self.rank & ~(bit - 1)
            yield self.rank ^ bit, range(mine, mine + bit), range(mine ^ bit, (mine ^ bit) + bit)

    def halved(self) -> Iterator[tuple[int, range, range]]:
        """Rounds that halve the parts of each rank: the peer, the parts that this rank keeps, and the peer's parts."""
        for bit in reversed(self.bits):
            mine = self.rank & ~(bit - 1)
            yield self.rank ^ bit, range(mine, mine + bit), range(mine ^ bit, (mine ^ bit) + bit)

    def spread(self, root: int) -> tuple[int | None, list[int]]:
        """A broadcast in the core from the root or its host: the rank to receive from, and the ranks to send to."""
        start = root - self.core if root >= self.core else root
        distance = self.rank ^ start
        first = distance.bit_length()
        source = self.rank ^ (1 << (first - 1)) if distance else None
        return source, [self.rank ^ bit for bit in self.bits[first:]]
