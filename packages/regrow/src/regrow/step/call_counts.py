"""Count of a body's collectives over the whole world up to its update: after too few, the others are asked. Pure.

A body that skips its reductions (because of a flag left by an earlier one) updates with gradients of its own, while the
others wait for it. Numbers may vary from step to step, but then they do on all ranks alike: all of them ask in the same
step, which is a vote. If one asks alone, its vote meets the others' reductions, and no rank commits.
"""

from regrow.core.ids import Generation

_SURE = 3
"""Number of bodies that show a habit."""


class CallCounts:
    """One worker's. What is known begins anew with each generation, so that all ranks know the same.

    Args:
        first: the generation in which this worker was to be from the start; another begins behind a fault, and in its
            first body all ranks ask.
    """

    def __init__(self, first: Generation | None) -> None:
        self._first = self._generation = first
        self._least: int | None = None
        self._ever, self._bodies = 0, 0
        """The least of all bodies of this worker, in all generations, and how many there were."""
        self._calls = 0
        self._counting = self._alone = False

    def begin(self, generation: Generation, world: int) -> None:
        """A body starts, in a world of `world` ranks. One rank alone has nobody to ask, and need not reduce."""
        self._calls, self._counting, self._alone = 0, True, world == 1
        if generation != self._generation:
            self._generation, self._least = generation, None

    def rehearse(self) -> None:
        """The body of a rehearsal starts."""
        self._calls, self._counting = 0, True

    def called(self, size: int, world: int) -> None:
        """A collective of `size` ranks was called."""
        if self._counting and size == world > 1:
            self._calls += 1

    def asks(self) -> bool:
        """At the update: whether to ask the others."""
        self._counting = False
        if self._alone:
            return False
        if self._least is None:
            return self._generation != self._first
        return self._calls < self._least

    @property
    def skipped(self) -> bool:
        """At the update: whether this first body behind a fault has called nothing, as no body before it has.

        All ranks may agree in that, where the fault has left the same in all of them.
        """
        behind = self._least is None and self._generation != self._first
        return not self._alone and behind and self._calls == 0 and self._ever > 0 and self._bodies >= _SURE

    def whole(self) -> None:
        """The body has ended well."""
        self._counting = False
        if self._alone:
            return
        self._ever, self._bodies = min(self._ever, self._calls) if self._bodies else self._calls, self._bodies + 1
        self._least = self._calls if self._least is None else min(self._least, self._calls)
