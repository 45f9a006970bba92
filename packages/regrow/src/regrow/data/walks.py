"""The order in which a rank fetches batches, which lets loader workers work ahead."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from regrow.data.fetched import Place


class Walk(Protocol):
    """An order of batches. Walks that compare equal give the same order."""

    def after(self, place: Place) -> Place:
        """The place after `place`, which must be on the walk."""
        ...

    def passes(self, place: Place) -> bool:
        """True if this place is on the walk."""
        ...


@dataclass(frozen=True)
class StepWalk:
    """Walk through the same share of each step."""

    def after(self, place: Place) -> Place:
        """The same share of the next step."""
        step, share, shares = place
        return step + 1, share, shares

    def passes(self, place: Place) -> bool:
        """True: the share is in every step."""
        return True


@dataclass(frozen=True)
class ShareWalk:
    """Several shares of each step, one after another: a rank's micro-batches.

    shares: the rank's shares, in order.
    """

    shares: tuple[int, ...]

    def after(self, place: Place) -> Place:
        """The next share of the step, or the first of the next step."""
        step, share, count = place
        at = self.shares.index(share) + 1
        return (step, self.shares[at], count) if at < len(self.shares) else (step + 1, self.shares[0], count)

    def passes(self, place: Place) -> bool:
        """True if the place's share is one of the rank's."""
        return place[1] in self.shares


@runtime_checkable
class Follower(Protocol):
    """A source that can fetch ahead if it knows the order of the requests."""

    def follow(self, walk: Walk) -> None:
        """Expect requests in this order from now on."""
        ...
