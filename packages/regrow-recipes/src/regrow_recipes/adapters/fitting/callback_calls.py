"""Calls the callbacks of a Lightning trainer once a step in a process, though the work after a step may run again."""

from collections.abc import Callable
from typing import Any

from regrow_recipes.adapters.once import OnceAStep

_ALWAYS = frozenset({"on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step"})
"""Hooks that are called each time: they change gradients, in a body that may run again."""


class CallbackCalls(OnceAStep[None]):
    """Wraps the hooks of callbacks that keep no state.

    Callbacks with a `state_dict` are called each time, since their state is protected and restored. All others may
    write to a file or a screen.

    Args:
        callbacks: of the trainer.
        base: the base class of all callbacks, whose hooks do nothing.
    """

    def __init__(self, callbacks: list[Any], base: type) -> None:
        super().__init__()
        for number, callback in enumerate(callbacks):
            kind = type(callback)
            once = not stateful(callback, base)
            for name in dir(base):
                hook = getattr(callback, name)
                if name.startswith("on_") and getattr(kind, name) is not getattr(base, name):
                    setattr(callback, name, self._listening(number, name, hook, once=once and name not in _ALWAYS))

    def _listening(self, number: int, name: str, hook: Callable[..., Any], *, once: bool) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._silent:
                return None
            if once and self._scope:
                key = self._key(number, name, self._count((number, name)))
                if key in self._delivered:
                    return None
                self._delivered[key] = None
            return hook(*args, **kwargs)

        return call


def stateful(callback: Any, base: type) -> bool:
    """True if a callback has state in `state_dict`."""
    return type(callback).state_dict is not base.state_dict  # type: ignore[attr-defined]
