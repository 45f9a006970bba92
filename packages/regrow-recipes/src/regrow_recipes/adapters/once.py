"""Memory of events by step: each is heard once in a process, though what follows a step may run several times."""

from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

Effect = TypeVar("Effect")


class OnceAStep(Generic[Effect]):
    """Base of what stands before callbacks; a subclass remembers the effect of each event under its `_key`."""

    def __init__(self) -> None:
        self._delivered: dict[tuple[int, str, Hashable], Effect] = {}
        """By step, part of it, and event in that."""
        self._counts = Counter[Hashable]()
        self._scope, self._step, self._silent = "", -1, False

    @contextmanager
    def silent(self, really: bool = True) -> Iterator[None]:
        """Within this nobody is called: a rehearsal, or a body that is run for warmth alone."""
        before, self._silent = self._silent, self._silent or really
        try:
            yield
        finally:
            self._silent = before

    @contextmanager
    def once(self, scope: str, step: int) -> Iterator[None]:
        """Within this each event of this part of this step is heard once only, however often the part is entered."""
        # A step may have begun here when what follows the one before it is run once more, for a newcomer.
        self._delivered = {key: effect for key, effect in self._delivered.items() if key[0] >= step - 1}
        self._step, self._scope = step, scope
        self._counts.clear()
        try:
            yield
        finally:
            self._scope = ""

    def _count(self, event: Hashable) -> int:
        """Number of this event within its part of the step, from 1."""
        self._counts[event] += 1
        return self._counts[event]

    def _key(self, *event: Hashable) -> tuple[int, str, Hashable]:
        return self._step, self._scope, event
