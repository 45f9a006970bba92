"""Collectives between the workers of one generation: process groups, and all-reduces that need every member."""

import random
from collections.abc import Mapping, Sequence
from typing import Protocol

from regrow.core.ids import Generation, Seconds, StepNo, WorkerId
from regrow.core.messages.vocabulary import Member


class Peer(Protocol):
    """A worker as its group sees it."""

    worker: WorkerId

    def formed(self) -> None:
        """Called when the group has formed."""
        ...

    def reduced(self, step: StepNo) -> None:
        """Called when the gradients of `step` are summed over all ranks."""
        ...

    def voted(self, step: StepNo) -> None:
        """Called when all ranks have the inputs of the update of `step`."""
        ...

    def symptom(self) -> None:
        """Called when a peer's connection was reset."""
        ...

    def later(self, delay: Seconds, what: str, *arguments: object) -> None:
        """Call the method `what` of this peer, unless the peer has changed its activity by then."""
        ...


class Group:
    """The groups of one generation.

    An all-reduce completes when every member has arrived at it, for each member at its own time; in between, the death
    of a member may break it for some but not for others. So survivors are at step n or n + 1, never further apart.

    Args:
        generation: the generation of these groups.
        members: the ordered table.
        rng: draws which members notice a failure.
    """

    def __init__(self, generation: Generation, members: Sequence[Member], rng: random.Random) -> None:
        self.generation = generation
        self.members = members
        self.broken = False
        self.stuck = False
        """True if the device work of these groups never ends: no sum completes, and no member notices."""
        self._rng = rng
        self._inside: dict[WorkerId, Peer] = {}
        self._arrived: dict[tuple[str, StepNo], set[WorkerId]] = {}

    def enter(self, peer: Peer) -> None:
        """Connect a member; the last one completes the group."""
        self._inside[peer.worker] = peer
        if self.broken:
            self._maybe_notice(peer)
        elif len(self._inside) == len(self.members):
            for inside in self._inside.values():
                inside.later(self._rng.uniform(0.003, 0.02), "formed")

    def arrive(self, peer: Peer, step: StepNo, what: str = "reduced") -> None:
        """Add a member's gradients of `step`, or its vote (`voted`); the last one completes the sum."""
        arrived = self._arrived.setdefault((what, step), set())
        arrived.add(peer.worker)
        if self.broken:
            self._maybe_notice(peer)
        elif self.stuck:
            pass
        elif len(arrived) == len(self.members):
            del self._arrived[what, step]
            for inside in self._inside.values():
                inside.later(self._rng.uniform(0.0, 0.05), what, step)

    def completes(self) -> bool:
        """True if a sum in progress still reaches one worker."""
        return not self.broken or self._rng.random() < 0.5

    def leave(self, peer: Peer, *, reset: bool) -> None:
        """Remove a member (`reset`: its connections are closed); the others block, and some of them notice."""
        if self._inside.pop(peer.worker, None) is None and not reset:
            return
        self.broken = True
        if reset:
            for inside in list(self._inside.values()):
                self._maybe_notice(inside)

    def has(self, worker: WorkerId) -> Peer | None:
        """The member with this id; None: it has left, or not entered yet."""
        return self._inside.get(worker)

    def _maybe_notice(self, peer: Peer) -> None:
        if self._rng.random() < 0.4:
            peer.later(self._rng.uniform(0.0, 0.02), "symptom")


def newest_size(groups: Mapping[Generation, Group]) -> int:
    """Number of ranks in the newest of these generations."""
    return len(groups[max(groups)].members)
