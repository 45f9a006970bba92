"""Records events by step: each is delivered once in a process, though the work after a step may run several times."""

from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

Effect = TypeVar("Effect")


class OnceAStep(Generic[Effect]):
    """Base of wrappers around callbacks; a subclass stores the effect of each event under its `_key`."""

    def __init__(self) -> None:
        self._delivered: dict[tuple[int, str, Hashable], Effect] = {}
        """By step, part of the step, and event in that part."""
        self._counts = Counter[Hashable]()
        self._scope, self._step, self._silent = "", -1, False

    @contextmanager
    def silent(self, really: bool = True) -> Iterator[None]:
        """Suppress all deliveries: for a rehearsal, or a body that only warms up."""
        before, self._silent = self._silent, self._silent or really
        try:
            yield
        finally:
            self._silent = before

    @contextmanager
    def once(self, scope: str, step: int) -> Iterator[None]:
        """Deliver each event of this part of this step only once, however often the part is entered."""
        # For a newcomer, the work after the previous step may run again after this step has begun here.
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
