"""Gradients that a body leaves without an update: who gathers them over several steps loses them in a fault."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

import torch

from regrow.core.errors import UsageError
from regrow.hydration.shards import local


class Leftovers:
    """The gradients that are there when a rehearsed body has ended without an update.

    A scaler's first overflow, or a loss that is not finite, leaves gradients too; there the next body clears them.

    Args:
        parameters: that are protected.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._left = [each for each in parameters if _has_gradient(each)]

    def __bool__(self) -> bool:
        return bool(self._left)

    @contextmanager
    def refuse_to_add(self) -> Iterator[None]:
        """Within this, a second body is rehearsed. It meets a `UsageError` where it adds to what the first has left."""
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


def _has_gradient(parameter: torch.Tensor) -> bool:
    gradient = parameter.grad
    if gradient is None or gradient.layout is not torch.strided or not gradient.is_floating_point():
        return False
    return parameter.is_leaf and parameter.requires_grad and bool(local(gradient).any())


def _mark(gradient: torch.Tensor) -> float:
    """So large that a gradient that is added to it leaves it as it is."""
    return torch.finfo(gradient.dtype).max / 4


def _look(parameter: torch.Tensor) -> None:
    gradient = parameter.grad
    if gradient is not None and bool((local(gradient) == _mark(gradient)).any()):
        raise UsageError(
            "a body makes no update and leaves its gradients, to which the next body adds: a fault would lose them",
            hint="accumulate inside one step: give session.steps(..., microbatches=...), or go through the "
            "micro-batches of an update within one `with step`, all but the last under no_sync()",
        )
