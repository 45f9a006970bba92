"""The collectives of large tensors on one machine, up to `rounds.DIRECT` ranks, with one partner at a time.

In step s a rank sends to the rank s places above it, and receives from the rank s places below. Received data is added
at once, so it is still in the processor's cache, only one part needs memory, and the kernel buffers one part a rank
instead of one a pair. A part is summed by its owner: first its own values, then those of the ranks below it, downwards
and around: the same order in each run.
"""

from collections.abc import Callable, Iterator

import torch

from regrow.comm.algorithms.hypercube import Exchange, Parts
from regrow.comm.headers import Call
from regrow.comm.reductions import Combine

STEP_BYTES = 1 << 20
"""Bytes sent in one step. With twice as much, 16 ranks take longer; with a quarter, groups of every size do."""


class Pairwise:
    """Runs the steps of one rank.

    Args:
        rank: this worker's rank in the group.
        size: number of ranks in the group.
        exchange: sends to some peers and receives from some.
        room: allocates tensors like the given one, in memory that its next call reuses.
    """

    def __init__(
        self, rank: int, size: int, exchange: Exchange, room: Callable[[torch.Tensor, int], list[torch.Tensor]]
    ) -> None:
        self._rank, self._size = rank, size
        self._exchange, self._room = exchange, room

    def all_reduce(self, flat: torch.Tensor, combine: Combine, call: Call) -> None:
        """All-reduce in place; each rank sends and receives about twice the tensor."""
        self._announce(call)
        step = self._size * max(1, STEP_BYTES // flat.element_size())
        for start in range(0, flat.numel(), step):
            piece = flat[start : start + step]
            bounds = [piece.numel() * at // self._size for at in range(self._size + 1)]
            parts = [piece[bounds[at] : bounds[at + 1]] for at in range(self._size)]
            self._reduce(parts, combine)
            self._gather(parts)

    def reduce_scatter(self, parts: Parts, combine: Combine, call: Call) -> None:
        """Make `parts[rank]` the reduction over all ranks; the other parts stay as they are."""
        self._announce(call)
        for pieces in _cut(parts):
            self._reduce(pieces, combine)

    def all_gather(self, parts: Parts, call: Call) -> None:
        """Fill each `parts[r]` with rank r's part; this rank gives `parts[rank]`. All parts have one size."""
        self._announce(call)
        for pieces in _cut(parts):
            self._gather(pieces)

    def _announce(self, call: Call) -> None:
        """Exchange headers with all ranks first, since later a rank may wait for a partner that another one delays."""
        nobodys: dict[int, Parts] = {peer: [] for peer in range(self._size) if peer != self._rank}
        self._exchange(nobodys, nobodys, call)

    def _reduce(self, pieces: Parts, combine: Combine) -> None:
        mine = pieces[self._rank]
        (arrived,) = self._room(mine, 1)
        for to, source in self._partners():
            self._exchange({to: [pieces[to]]}, {source: [arrived]})
            combine(mine, arrived)

    def _gather(self, pieces: Parts) -> None:
        mine = [pieces[self._rank]]
        for to, source in self._partners():
            self._exchange({to: mine}, {source: [pieces[source]]})

    def _partners(self) -> Iterator[tuple[int, int]]:
        """For each step, the rank to send to and the rank to receive from."""
        for step in range(1, self._size):
            yield (self._rank + step) % self._size, (self._rank - step) % self._size


def _cut(parts: Parts) -> Iterator[Parts]:
    """Yield the same piece of each part, piece by piece; all parts have one size."""
    step = max(1, STEP_BYTES // parts[0].element_size())
    for start in range(0, parts[0].numel(), step):
        yield [part[start : start + step] for part in parts]
