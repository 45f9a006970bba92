"""Calls a trainer's callbacks once a step in a process, though the work after a step may run several times."""

import copy
from typing import Any, NamedTuple

from regrow_recipes.adapters.once import OnceAStep

_EACH_TIME = frozenset({"on_prediction_step"})
"""Events that are too many to record, and that no callback counts."""


class _Delivered(NamedTuple):
    """Effect of one event on one callback."""

    event: str
    control: dict[str, Any]


class Deliveries(OnceAStep[_Delivered]):
    """Replaces a handler's `call_event`.

    Callbacks that have a state of their own (`ExportableState`), and the one that decides when to log, evaluate and
    save, are called each time: their state is protected and restored. All others may write to a file or a screen.

    Args:
        handler: the trainer's `CallbackHandler`.
        each_time: classes of callbacks that are called each time.
    """

    def __init__(self, handler: Any, *, each_time: tuple[type, ...]) -> None:
        super().__init__()
        self._handler, self._each_time = handler, each_time
        handler.call_event = self._deliver

    def _deliver(self, event: str, args: Any, state: Any, control: Any, **more: Any) -> Any:
        if self._silent:
            return control
        everyone = list(self._handler.callbacks)
        if not self._scope or event in _EACH_TIME:
            return self._call(everyone, event, args, state, control, **more)
        at = self._count("an event")
        for number, callback in enumerate(everyone):
            key = self._key(at, number)
            delivered = self._delivered.get(key)
            if delivered is not None and delivered.event == event and not isinstance(callback, self._each_time):
                vars(control).update(delivered.control)
                continue
            control = self._call([callback], event, args, state, control, **more)
            self._delivered[key] = _Delivered(event, dict(vars(control)))
        return control

    def _call(self, callbacks: list[Any], event: str, args: Any, state: Any, control: Any, **more: Any) -> Any:
        handler = copy.copy(self._handler)
        handler.callbacks = callbacks
        return type(handler).call_event(handler, event, args, state, control, **more)
