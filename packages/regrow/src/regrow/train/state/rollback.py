"""Undoes the changes that a step has made before its update.

Parameters and optimizer state usually change in the update only. Those that a script is known to change before it are
copied too (`early`), and everything is copied if a body cannot be separated from its update.
"""

from collections.abc import Iterable

import torch
from torch.utils.hooks import RemovableHandle

from regrow.core.errors import StateError
from regrow.train.state.moment import Moment, Scope
from regrow.train.state.naming import ProtectedObjects


class Undo:
    """Remembers one moment, the start of a step, and goes back to it."""

    def __init__(self, protected: ProtectedObjects, start: Moment) -> None:
        self._roster = protected
        self._start = self._own = start
        self._updates = 0
        self._hooks: list[RemovableHandle] | None = None

    def _watch(self) -> None:
        # Not in the constructor: the session's hook, which may forbid an update, must run before this hook counts it.
        self._hooks = [
            optimizer.register_step_pre_hook(self._update_begins) for optimizer in self._roster.optimizers.values()
        ]

    def _update_begins(self, *_: object) -> None:
        # Fused optimizers write to parameters without counting versions; this catches them.
        self._updates += 1

    def close(self) -> None:
        """Remove the hooks from the optimizers."""
        for hook in self._hooks or ():
            hook.remove()
        self._hooks = None

    def begin(self, scope: Scope, *, start: Moment | None = None) -> None:
        """Remember the state as it is now.

        Args:
            scope: state to copy in addition to what is always copied.
            start: moment that remembers the state; None for this object's own.
        """
        self._start = start or self._own
        if self._hooks is None:
            self._watch()
        self._start.take(scope)
        parameters = self._roster.parameters.values()
        self._had_gradient = [parameter.grad is not None for parameter in parameters]
        self._versions = [parameter._version for parameter in parameters]
        self._updates_before = self._updates

    def parameters_changed(self) -> bool:
        """True if an update has changed anything since `begin`. Raises `StateError` if there was no `begin`."""
        self._check()
        return self._updates != self._updates_before or bool(self._start.left_changed) or bool(self.written())

    def written(self) -> list[str]:
        """Parameters whose version has changed since `begin`."""
        parameters = self._roster.parameters.items()
        return [
            name
            for (name, parameter), version in zip(parameters, self._versions, strict=True)
            if parameter._version != version
        ]

    def early(self) -> list[str]:
        """Names that have changed since `begin` without an update, as far as versions show."""
        self._check()
        return self.written() + self._start.left_changed

    def rollback(self) -> list[str]:
        """Go back to `begin`. A gradient that existed then becomes zero. Raises `StateError` if there was no `begin`.

        Returns names of state that has changed and was not remembered.
        """
        self._check()
        lost = [name for name in self.early() if name not in self._start.scope]
        lost += self._start.go_back()
        for parameter, had in zip(self._roster.parameters.values(), self._had_gradient, strict=True):
            put_gradient(parameter, had)
        return lost

    def _check(self) -> None:
        if not self._start.taken:
            raise StateError("nothing was remembered of this step", hint="call begin() first")


def put_gradient(parameter: torch.Tensor, present: bool) -> None:
    """Give a parameter a gradient of zeros if `present`, else none."""
    if not present:
        parameter.grad = None
    elif parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    else:
        parameter.grad.detach().zero_()


def copied_gradients(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor | None]:
    """A copy of each parameter's gradient; None for one that has none."""
    return [None if each.grad is None else each.grad.detach().clone() for each in parameters]


def give_gradients(parameters: Iterable[torch.Tensor], gradients: Iterable[torch.Tensor | None]) -> None:
    """Give each parameter the gradient that was copied from it. The copies can be used again."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = None if gradient is None else gradient.clone()
