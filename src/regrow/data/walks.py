"""In which order a rank fetches batches: what lets loader workers run ahead."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from regrow.data.sampling import Key, Plan

Place = tuple[int, int, int]
"""(step, share, number of shares): which batch. In a world without micro-batches a share is a rank's."""


class Walk(Protocol):
    """Which batch follows which. Walks that are equal give the same order."""

    def after(self, place: Place) -> Place:
        """The batch that is wanted after that of `place`."""
        ...

    def keys(self, plan: Plan, start: Place) -> Iterator[list[Key]]:
        """The samples of the batch of `start` and of all that follow, without end."""
        ...


@dataclass(frozen=True)
class StepWalk:
    """The same share of each step."""

    def after(self, place: Place) -> Place:
        """The next step's."""
        step, share, shares = place
        return step + 1, share, shares

    def keys(self, plan: Plan, start: Place) -> Iterator[list[Key]]:
        """As `Walk` says."""
        return plan.keys_from(*start)


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

    def keys(self, plan: Plan, start: Place) -> Iterator[list[Key]]:
        """As `Walk` says."""
        step, first, count = start
        begun = self.shares.index(first)
        # One walk over the steps for each share: a sampler's order is drawn once an epoch and share, not at each batch.
        walks = [plan.keys_from(step + (at < begun), share, count) for at, share in enumerate(self.shares)]
        at = begun
        while True:
            yield next(walks[at])
            at = (at + 1) % len(walks)
