"""The collectives of large tensors on one machine, up to `rounds.DIRECT` ranks: one partner to send to, one to hear.

In step s a rank sends to the one s places above it, and hears from the one s places below. What arrives is added at
once, so it is still in the processor's cache, there is room for one part only, and the kernel holds one part a rank in
place of one a pair. A part is summed by its owner: first its own, then those of the ranks below it, downwards and
round: one order, the same in each run.
"""

from collections.abc import Callable, Iterator

import torch

from regrow.comm.algorithms.hypercube import Exchange, Parts
from regrow.comm.headers import Call
from regrow.comm.reductions import Combine

STEP_BYTES = 1 << 20
"""Sent in one step; with twice as much 16 ranks take longer, with a quarter all do."""


class Pairwise:
    """The steps of one rank, carried out.

    Args:
        rank: of the group.
        size: ranks in the group.
        exchange: sends to some peers and receives from some.
        room: makes tensors like the given one, in memory that is used again at its next call.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        exchange: Exchange,
        room: Callable[[torch.Tensor, int], list[torch.Tensor]],
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
        """`parts[rank]` becomes the reduction of every rank's; the other parts are not written to."""
        self._announce(call)
        for pieces in _cut(parts):
            self._reduce(pieces, combine)

    def all_gather(self, parts: Parts, call: Call) -> None:
        """`parts[r]`, of one size for all, becomes rank r's; `parts[rank]` is this one's."""
        self._announce(call)
        for pieces in _cut(parts):
            self._gather(pieces)

    def _announce(self, call: Call) -> None:
        """All learn at once what each calls: later some wait for a partner that is held up by another."""
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
        """To whom it sends in each step, and from whom it hears."""
        for step in range(1, self._size):
            yield (self._rank + step) % self._size, (self._rank - step) % self._size


def _cut(parts: Parts) -> Iterator[Parts]:
    """Pieces of all parts, which are of one size."""
    step = max(1, STEP_BYTES // parts[0].element_size())
    for start in range(0, parts[0].numel(), step):
        yield [part[start : start + step] for part in parts]
