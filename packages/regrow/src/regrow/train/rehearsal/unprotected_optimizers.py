"""Refuses optimizers that step in a body, or in a training with its own loop, without being protected."""

from collections.abc import Callable, Iterable

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from regrow.core.errors import UsageError
from regrow.hydration.shards import local
from regrow.train.state.protected import ProtectedState

_OF_SLICES = (
    "its parameters are slices of protected ones, as where each rank updates a part: give both in a call of their own, "
    'protect(torch.nn.ParameterList(slices), optimizer, part=f"rank{session.rank}"), and run with --buddy-every'
)


class UnprotectedOptimizers:
    """Checks every optimizer step, by torch's global hook.

    Args:
        state: returns the protected state; called each time.
        body: returns True if the script is in the body of a step.
        training: returns True if the script is in a function that is the whole training.
        goes_on: called with the error; returns True if training goes on all the same.
    """

    def __init__(
        self,
        state: Callable[[], ProtectedState],
        *,
        body: Callable[[], bool],
        training: Callable[[], bool],
        goes_on: Callable[[UsageError], bool],
    ) -> None:
        self._state, self._body, self._training, self._goes_on = state, body, training, goes_on
        self._known: set[int] = set()
        self._hook = register_optimizer_step_pre_hook(self._steps)

    def close(self) -> None:
        """Stop checking."""
        self._hook.remove()

    def _steps(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if id(optimizer) in self._known or not (self._body() or self._training()):
            return
        # Wrappers (Accelerate's) return the state of the wrapped optimizer as their own.
        state = self._state()
        if not any(optimizer is mine or optimizer.state is mine.state for mine in state.optimizers()):
            mine = {id(parameter) for parameter in state.parameters()}
            given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            foreign = [parameter for parameter in given if id(parameter) not in mine]
            slices = foreign and not _storages(foreign) - _storages(state.parameters())
            what = f", and neither is its parameter of shape {list(foreign[0].shape)}" if foreign else ""
            where = "step's body" if self._body() else "training"
            error = UsageError(
                f"an optimizer ({type(optimizer).__name__}) steps in the {where}, but is not protected{what}: "
                "after a fault the ranks would differ",
                hint=_OF_SLICES if slices else f"give it {'and its module ' if foreign else ''}to protect() too",
            )
            if not self._goes_on(error):
                raise error
        self._known.add(id(optimizer))


def _storages(parameters: Iterable[torch.Tensor]) -> set[int]:
    return {each.untyped_storage().data_ptr() for each in map(local, parameters)}
