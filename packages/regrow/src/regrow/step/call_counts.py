"""Counts the collectives that a body calls before its update: if there are fewer than usual, the ranks vote. Pure.

A body may skip its reductions because of a flag that an earlier body has left. Its rank then updates with its own
gradients, while the other ranks wait for it. A number that varies from step to step varies alike on all ranks: all vote
in the same step. If one rank votes alone, its vote meets the others' reductions, and no rank commits.
"""

from regrow.core.ids import Generation

_SURE = 3
"""Number of bodies after which the usual number of calls counts as known."""


class CallCounts:
    """Counts the collectives of one worker, anew in each generation, so that all ranks know the same numbers.

    Args:
        first: the generation in which this worker began as a rank; None if it began without a rank. Any other
            generation follows a fault, and in its first body all ranks vote.
    """

    def __init__(self, first: Generation | None) -> None:
        self._first = self._generation = first
        self._least: int | None = None
        self._ever, self._bodies = 0, 0
        """Fewest calls in a body of this worker so far, and the number of its bodies, over all generations."""
        self._calls = 0
        self._counting = self._alone = False

    def begin(self, generation: Generation, world: int) -> None:
        """Begin a body, in a world of `world` ranks. A single rank does not vote, and need not reduce."""
        self._calls, self._counting, self._alone = 0, True, world == 1
        if generation != self._generation:
            self._generation, self._least = generation, None

    def rehearse(self) -> None:
        """Begin the body of a rehearsal."""
        self._calls, self._counting = 0, True

    def called(self, size: int, world: int) -> None:
        """Count a collective of `size` ranks if these are the whole world."""
        if self._counting and size == world > 1:
            self._calls += 1

    def must_vote(self) -> bool:
        """Called at the update: True if the ranks must vote on it."""
        self._counting = False
        if self._alone:
            return False
        if self._least is None:
            return self._generation != self._first
        return self._calls < self._least

    @property
    def skipped(self) -> bool:
        """At the update: True if this first body after a fault has called no collective, though all bodies before did.

        All ranks may do so alike, if the fault has left the same flag in all of them.
        """
        behind = self._least is None and self._generation != self._first
        return not self._alone and behind and self._calls == 0 and self._ever > 0 and self._bodies >= _SURE

    def completed(self) -> None:
        """Count a body that ended without an error."""
        self._counting = False
        if self._alone:
            return
        self._ever, self._bodies = min(self._ever, self._calls) if self._bodies else self._calls, self._bodies + 1
        self._least = self._calls if self._least is None else min(self._least, self._calls)
