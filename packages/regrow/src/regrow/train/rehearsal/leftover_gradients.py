"""Finds gradients that a body leaves without an update: a script that gathers them over steps loses them in a fault."""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

import torch
from torch.utils.hooks import RemovableHandle

from regrow.core.errors import UsageError
from regrow.hydration.shards import local

GATHERED = "a body makes no update and leaves its gradients, to which the next body adds"
INSIDE_ONE = (
    "accumulate inside one step: give session.steps(..., microbatches=...), or go through the micro-batches of an "
    "update within one `with step`, all but the last under no_sync()"
)


class Leftovers:
    """The gradients left by a rehearsed body that made no update.

    A scaler's first overflow, or a loss that is not finite, leaves gradients too; the next body clears those.

    Args:
        parameters: the protected parameters.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._left = [each for each in parameters if _has_gradient(each)]

    def __bool__(self) -> bool:
        return bool(self._left)

    @contextmanager
    def refuse_to_add(self) -> Iterator[None]:
        """Context of a second rehearsal, which raises `UsageError` if it adds to gradients that the first has left."""
        hooks = []
        for parameter in self._left:
            if (gradient := parameter.grad) is not None:
                local(gradient).detach().fill_(_mark(gradient))
            with suppress(RuntimeError):  # torch knows no such hook for this kind of tensor
                hooks.append(parameter.register_post_accumulate_grad_hook(_look))  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


class GatheredGradients:
    """Detects gathered gradients in the first steps too, since `if step % n == 0` updates in the very first body.

    Those steps are committed, so a finding is reported, not refused. Gradients keep their values here: their versions
    show that a body adds to one that was left. None is kept alive, so that a body that drops them frees their memory.
    """

    def __init__(self) -> None:
        self.found = False
        """True once a body has added to gradients that the one before had left."""
        self._left: list[tuple[torch.Tensor, weakref.ref[torch.Tensor], int]] = []
        self._hooks: list[RemovableHandle] = []

    def begins(self) -> None:
        """Watch the gradients left by the last body, as a body begins."""
        for parameter, gradient, version in self._left:
            look = partial(self._look, gradient, version)
            with suppress(RuntimeError):  # torch knows no such hook for this kind of tensor
                self._hooks.append(parameter.register_post_accumulate_grad_hook(look))  # type: ignore[no-untyped-call]

    def ended(self, parameters: Iterable[torch.Tensor], *, updated: bool) -> None:
        """Note the gradients that a step has left, if it has made no update."""
        while self._hooks:
            self._hooks.pop().remove()
        kept = [] if updated else [each for each in parameters if _has_gradient(each)]
        self._left = [(each, weakref.ref(each.grad), each.grad._version) for each in kept if each.grad is not None]

    def _look(self, left: "weakref.ref[torch.Tensor]", version: int, parameter: torch.Tensor) -> None:
        gradient = left()
        # A gradient that was cleared and then added to would be two versions further.
        self.found |= gradient is not None and parameter.grad is gradient and gradient._version == version + 1


def _has_gradient(parameter: torch.Tensor) -> bool:
    gradient = parameter.grad
    if gradient is None or gradient.layout is not torch.strided or not gradient.is_floating_point():
        return False
    return parameter.is_leaf and parameter.requires_grad and bool(local(gradient).any())


def _mark(gradient: torch.Tensor) -> float:
    """A number so large that a gradient added to it does not change it."""
    return torch.finfo(gradient.dtype).max / 4


def _look(parameter: torch.Tensor) -> None:
    gradient = parameter.grad
    if gradient is not None and bool((local(gradient) == _mark(gradient)).any()):
        raise UsageError(f"{GATHERED}: a fault would lose them", hint=INSIDE_ONE)
