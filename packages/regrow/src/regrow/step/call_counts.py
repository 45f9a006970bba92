"""Number of a body's collectives over the whole world up to its update: after too few, ranks vote. Pure.

A body that skips its reductions (because of a flag left by an earlier one) updates with gradients of its own, while the
others wait for it. The number may vary from step to step, but then on all ranks alike: all of them vote in the same
step. If one rank votes alone, its vote meets the others' reductions, and no rank commits.
"""

from regrow.core.ids import Generation

_SURE = 3
"""Number of bodies after which their usual number of calls counts as known."""


class CallCounts:
    """Calls of one worker. Counting begins anew with each generation, so that all ranks know the same numbers.

    Args:
        first: the generation in which this worker began as a rank; None: it did not. Any other generation follows a
            fault, and in its first body all ranks vote.
    """

    def __init__(self, first: Generation | None) -> None:
        self._first = self._generation = first
        self._least: int | None = None
        self._ever, self._bodies = 0, 0
        """The smallest number of calls in a body of this worker in all generations, and the number of bodies."""
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
        """A collective of `size` ranks was called."""
        if self._counting and size == world > 1:
            self._calls += 1

    def must_vote(self) -> bool:
        """At the update: True if ranks must vote."""
        self._counting = False
        if self._alone:
            return False
        if self._least is None:
            return self._generation != self._first
        return self._calls < self._least

    @property
    def skipped(self) -> bool:
        """At the update: True if this first body after a fault has called no collective, unlike all bodies before.

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
