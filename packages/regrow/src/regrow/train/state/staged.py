"""Newer state, received beside the own: a survivor that is a step behind keeps its state until it has the next whole.

Otherwise the death of the one worker that was ahead, in the middle of the reception, would leave no whole state
anywhere.
"""

from collections.abc import Callable

import torch

from regrow.core.ids import StepNo
from regrow.hydration.inventory import Inventory
from regrow.train.state.protected import ProtectedState


class StagedState:
    """A `StateSink` that fills memory of its own, and replaces the protected state only at the end.

    Args:
        state: what is replaced.
        replace: called before; raises when the state must stay as it is.
        replaced: called after, with the step.
    """

    def __init__(self, state: ProtectedState, *, replace: Callable[[], None], replaced: Callable[[StepNo], None]):
        self._state, self._replace, self._replaced = state, replace, replaced
        self._own: dict[str, torch.Tensor] = {}
        self._staged: dict[str, torch.Tensor] = {}
        self._step = StepNo(0)

    def prepare(self, inventory: Inventory) -> dict[str, torch.Tensor]:
        """Memory for every entry, in the processor's memory. Raises `StateError` where the two sides do not fit."""
        self._step = inventory.step
        self._own = self._state.prepare(inventory)
        self._staged = {name: torch.empty(t.shape, dtype=t.dtype) for name, t in self._own.items()}
        return self._staged

    def finish(self) -> None:
        """Everything has arrived: replace the state. Raises `GenerationHalted` before anything is changed."""
        self._replace()
        with torch.no_grad():
            for name, own in self._own.items():
                own.detach().copy_(self._staged[name])
        self._state.finish()
        self._replaced(self._step)
