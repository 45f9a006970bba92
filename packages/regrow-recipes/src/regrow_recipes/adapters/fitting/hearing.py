"""Callbacks of a Lightning trainer hear of each step once in a process, though what follows it may run again."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_ALWAYS = frozenset({"on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step"})
"""These work on gradients, in a body that may run again."""


class Hearing:
    """Stands before the hooks of callbacks that keep no state.

    Those that have a `state_dict` are called each time: their state is protected and was put back. All others may
    write to a file or a screen.

    Args:
        callbacks: of the trainer.
        base: the class that all are of; whose hooks do nothing.
    """

    def __init__(self, callbacks: list[Any], base: type) -> None:
        self._heard: set[tuple[int, str, int, str, int]] = set()
        self._counts: dict[tuple[int, str], int] = {}
        self._scope, self._step, self._silent = "", -1, False
        for number, callback in enumerate(callbacks):
            kind = type(callback)
            once = not stateful(callback, base)
            for name in dir(base):
                hook = getattr(callback, name)
                if name.startswith("on_") and getattr(kind, name) is not getattr(base, name):
                    setattr(callback, name, self._listening(number, name, hook, once=once and name not in _ALWAYS))

    @contextmanager
    def silent(self, really: bool = True) -> Iterator[None]:
        """Within this nobody is called: a rehearsal."""
        before, self._silent = self._silent, self._silent or really
        try:
            yield
        finally:
            self._silent = before

    @contextmanager
    def once(self, scope: str, step: int) -> Iterator[None]:
        """Within this, each call of this part of this step reaches who hears once only, however often it is made."""
        self._heard = {key for key in self._heard if key[0] >= step - 1}
        self._step, self._scope, self._counts = step, scope, {}
        try:
            yield
        finally:
            self._scope = ""

    def _listening(self, number: int, name: str, hook: Callable[..., Any], *, once: bool) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._silent:
                return None
            if once and self._scope:
                count = self._counts[number, name] = self._counts.get((number, name), 0) + 1
                key = (self._step, self._scope, number, name, count)
                if key in self._heard:
                    return None
                self._heard.add(key)
            return hook(*args, **kwargs)

        return call


def stateful(callback: Any, base: type) -> bool:
    """True if a callback has a state of its own in `state_dict`."""
    return type(callback).state_dict is not base.state_dict  # type: ignore[attr-defined]
