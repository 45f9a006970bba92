"""Callbacks of a trainer hear of each step once in a process, though what follows a step may run several times."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

_EACH_TIME = frozenset({"on_prediction_step"})
"""Events too many to be remembered, of which nobody keeps count."""


class _Heard(NamedTuple):
    """Effect of one event on one callback."""

    event: str
    control: dict[str, Any]


class Deliveries:
    """Stands in the place of a handler's `call_event`.

    Callbacks that have a state of their own (`ExportableState`), and the one that decides when to log, evaluate and
    save, are called each time: their state is protected and was put back. All others may write to a file or a screen.

    Args:
        handler: the trainer's `CallbackHandler`.
        each_time: kinds of callbacks that are called each time.
    """

    def __init__(self, handler: Any, *, each_time: tuple[type, ...]) -> None:
        self._handler, self._each_time = handler, each_time
        self._heard: dict[tuple[int, str, int, int], _Heard] = {}
        """By step, part of it, event in that, and callback."""
        self._scope = ""
        self._step = -1
        self._at = 0
        self._silent = False
        handler.call_event = self._deliver

    @contextmanager
    def silent(self, really: bool = True) -> Iterator[None]:
        """Within this, nobody is called: a rehearsal, or a body that is run for warmth alone."""
        before, self._silent = self._silent, self._silent or really
        try:
            yield
        finally:
            self._silent = before

    @contextmanager
    def once(self, scope: str, step: int) -> Iterator[None]:
        """Within this, each event of this part of this step is delivered once, however often it is entered."""
        # A step may have begun here when what follows the one before it is run once more, for a newcomer.
        self._heard = {key: heard for key, heard in self._heard.items() if key[0] >= step - 1}
        self._step, self._scope, self._at = step, scope, 0
        try:
            yield
        finally:
            self._scope = ""

    def _deliver(self, event: str, args: Any, state: Any, control: Any, **more: Any) -> Any:
        if self._silent:
            return control
        everyone = list(self._handler.callbacks)
        if not self._scope or event in _EACH_TIME:
            return self._call(everyone, event, args, state, control, **more)
        self._at += 1
        for number, callback in enumerate(everyone):
            key = (self._step, self._scope, self._at, number)
            heard = self._heard.get(key)
            if heard is not None and heard.event == event and not isinstance(callback, self._each_time):
                vars(control).update(heard.control)
                continue
            control = self._call([callback], event, args, state, control, **more)
            self._heard[key] = _Heard(event, dict(vars(control)))
        return control

    def _call(self, callbacks: list[Any], event: str, args: Any, state: Any, control: Any, **more: Any) -> Any:
        handler = copy.copy(self._handler)
        handler.callbacks = callbacks
        return type(handler).call_event(handler, event, args, state, control, **more)
