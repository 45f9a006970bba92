"""Collectives of groups above `rounds.DIRECT` ranks, in a number of rounds equal to the bits of the group's size.

A reduction joins two blocks of neighbouring ranks at a time, the lower one on the left, in one tree over all ranks: all
get the same bits, whatever arrives first. Small tensors are sent whole in each round; for large ones each round halves
the part that a rank continues with, and the sums are gathered in as many rounds.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from regrow.comm.algorithms.rounds import Rounds
from regrow.comm.headers import Call
from regrow.comm.reductions import Combine

Parts = Sequence[torch.Tensor]
ByPeer = dict[int, Parts]


class Exchange(Protocol):
    """Function that exchanges tensors with peers; with `call`, both sides first exchange and compare headers."""

    def __call__(self, out: ByPeer, into: ByPeer, call: Call | None = None) -> None:
        """Send `out` and receive `into`; return when both are complete."""
        ...


class Hypercube:
    """Runs the rounds of one rank.

    Args:
        rounds: the partners of each round.
        exchange: sends to some peers and receives from some.
        room: allocates tensors like the given one, in memory that its next call reuses.
    """

    def __init__(
        self, rounds: Rounds, exchange: Exchange, room: Callable[[torch.Tensor, int], list[torch.Tensor]]
    ) -> None:
        self._rounds, self._exchange, self._room = rounds, exchange, room

    def reduce_small(self, flat: torch.Tensor, combine: Combine, call: Call) -> None:
        """All-reduce in place; each round sends the whole tensor."""
        if self._as_guest([flat], [flat], call):
            return
        (arrived,) = self._room(flat, 1)
        self._take_guest([flat], [arrived], combine, call)
        for peer in self._rounds.peers:
            self._exchange({peer: [flat]}, {peer: [arrived]}, call)
            self._join([flat], [arrived], combine, peer)
        self._answer_guest([flat])

    def reduce_large(self, flat: torch.Tensor, combine: Combine, call: Call | None) -> None:
        """All-reduce in place; each rank sends and receives about twice the tensor."""
        rounds = self._rounds
        if self._as_guest([flat], [flat], call):
            return
        (arrived,) = self._room(flat, 1)
        self._take_guest([flat], [arrived], combine, call)
        bounds = [flat.numel() * at // rounds.core for at in range(rounds.core + 1)]

        def part(ranks: range) -> torch.Tensor:
            return flat[bounds[ranks.start] : bounds[ranks.stop]]

        for peer, kept, given in rounds.halved():
            mine = part(kept)
            theirs = arrived[: mine.numel()]
            self._exchange({peer: [part(given)]}, {peer: [theirs]}, call)
            self._join([mine], [theirs], combine, peer)
        for peer, had, missing in rounds.gathered():
            self._exchange({peer: [part(had)]}, {peer: [part(missing)]})
        self._answer_guest([flat])

    def reduce_scatter(self, parts: list[torch.Tensor], combine: Combine, call: Call) -> None:
        """Make `parts[rank]` the reduction over all ranks; the other parts are overwritten."""
        rounds = self._rounds
        if self._as_guest(parts, [parts[rounds.rank]], call):
            return
        arrived = self._room(parts[0], len(parts))
        self._take_guest(parts, arrived, combine, call)
        for peer, kept, given in rounds.halved():
            mine, theirs = rounds.with_guests(kept), rounds.with_guests(given)
            here = arrived[: len(mine)]
            self._exchange({peer: [parts[rank] for rank in theirs]}, {peer: here}, call)
            self._join([parts[rank] for rank in mine], here, combine, peer)
        if rounds.guest is not None:
            self._answer_guest([parts[rounds.guest]])

    def all_gather(self, parts: Parts, call: Call) -> None:
        """Fill each `parts[r]` with rank r's part; this rank gives `parts[rank]`. All parts have one size."""
        rounds = self._rounds
        others = [part for rank, part in enumerate(parts) if rank != rounds.rank]
        if self._as_guest([parts[rounds.rank]], others, call):
            return
        guest = rounds.guest
        if guest is not None:
            self._exchange({}, {guest: [parts[guest]]}, call)
        for peer, had, missing in rounds.gathered():
            out, into = rounds.with_guests(had), rounds.with_guests(missing)
            self._exchange({peer: [parts[rank] for rank in out]}, {peer: [parts[rank] for rank in into]}, call)
        self._answer_guest([part for rank, part in enumerate(parts) if rank != guest])

    def broadcast(self, flat: torch.Tensor, root: int, call: Call) -> None:
        """Give all ranks the root's values, in place."""
        rounds = self._rounds
        if rounds.host is not None:
            there: ByPeer = {rounds.host: [flat]}
            self._exchange(there if rounds.rank == root else {}, {} if rounds.rank == root else there, call)
            return
        source, targets = (root, rounds.spread(root)[1]) if rounds.guest == root else rounds.spread(root)
        if source is not None:
            self._exchange({}, {source: [flat]}, call)
        if rounds.guest is not None and rounds.guest != root:
            targets = [*targets, rounds.guest]
        self._exchange({target: [flat] for target in targets}, {}, call)

    # --- ranks beyond the core ---------------------------------------------------------------------------------

    def _as_guest(self, given: Parts, result: Parts, call: Call | None) -> bool:
        """On a rank beyond the core: send all to the host, and receive the result from it. False in the core."""
        host = self._rounds.host
        if host is None:
            return False
        self._exchange({host: given}, {}, call)
        self._exchange({}, {host: result})
        return True

    def _take_guest(self, parts: Parts, arrived: Parts, combine: Combine, call: Call | None) -> None:
        guest = self._rounds.guest
        if guest is not None:
            self._exchange({}, {guest: arrived}, call)
            self._join(parts, arrived, combine, guest)

    def _answer_guest(self, result: Parts) -> None:
        if self._rounds.guest is not None:
            self._exchange({self._rounds.guest: result}, {})

    def _join(self, mine: Parts, theirs: Parts, combine: Combine, peer: int) -> None:
        """Reduce `theirs` into `mine`, with the lower rank's values on the left."""
        for here, there in zip(mine, theirs, strict=True):
            if peer < self._rounds.rank:
                combine(there, here)
                here.copy_(there)
            else:
                combine(here, there)
