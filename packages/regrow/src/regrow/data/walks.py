"""In which order a rank fetches batches: what lets loader workers run ahead."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from regrow.data.fetched import Place


class Walk(Protocol):
    """Order in which batches follow one another. Walks that are equal give the same order."""

    def after(self, place: Place) -> Place:
        """The batch that is wanted after that of `place`, which it passes."""
        ...

    def passes(self, place: Place) -> bool:
        """True if the walk passes this place."""
        ...


@dataclass(frozen=True)
class StepWalk:
    """The same share of each step."""

    def after(self, place: Place) -> Place:
        """The next step's."""
        step, share, shares = place
        return step + 1, share, shares

    def passes(self, place: Place) -> bool:
        """Everywhere."""
        return True


@dataclass(frozen=True)
class ShareWalk:
    """Several shares of each step, one after another: a rank's micro-batches.

    shares: which, in order.
    """

    shares: tuple[int, ...]

    def after(self, place: Place) -> Place:
        """The next share of the step, or the first of the next step."""
        step, share, count = place
        at = self.shares.index(share) + 1
        return (step, self.shares[at], count) if at < len(self.shares) else (step + 1, self.shares[0], count)

    def passes(self, place: Place) -> bool:
        """At its shares."""
        return place[1] in self.shares


@runtime_checkable
class Follower(Protocol):
    """Source that can fetch ahead if it knows the order of the requests."""

    def follow(self, walk: Walk) -> None:
        """From now on, batches are asked for in this order."""
        ...
