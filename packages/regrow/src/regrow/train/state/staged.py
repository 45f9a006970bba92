"""Receives newer state into extra memory: a survivor that is a step behind keeps its state until all has arrived.

Otherwise, if the only worker that was ahead died during the transfer, no complete state would be left.
"""

from collections.abc import Callable

import torch

from regrow.core.ids import StepNo
from regrow.hydration.inventory import Inventory
from regrow.train.state.protected import ProtectedState


class StagedState:
    """A `StateSink` that fills memory of its own, and replaces the protected state only at the end.

    Args:
        state: the state that is replaced.
        replace: called before the replacement; raises if the state must stay as it is.
        replaced: called after the replacement, with the step.
    """

    def __init__(self, state: ProtectedState, *, replace: Callable[[], None], replaced: Callable[[StepNo], None]):
        self._state, self._replace, self._replaced = state, replace, replaced
        self._own: dict[str, torch.Tensor] = {}
        self._staged: dict[str, torch.Tensor] = {}
        self._step = StepNo(0)

    def prepare(self, inventory: Inventory) -> dict[str, torch.Tensor]:
        """Host memory for every entry. Raises `StateError` if the two sides do not fit."""
        self._step = inventory.step
        self._own = self._state.prepare(inventory)
        self._staged = {name: torch.empty(t.shape, dtype=t.dtype) for name, t in self._own.items()}
        return self._staged

    def finish(self) -> None:
        """Replace the state, as everything has arrived. Raises `GenerationHalted` before anything is changed."""
        self._replace()
        with torch.no_grad():
            for name, own in self._own.items():
                own.detach().copy_(self._staged[name])
        self._state.finish()
        self._replaced(self._step)
