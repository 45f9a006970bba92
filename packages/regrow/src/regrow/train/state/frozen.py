"""`state@n` as newcomers read it, while this worker already runs step n again.

A step's body changes no parameter and no optimizer state before its update, and by then every newcomer is done. But it
changes buffers (running statistics) and may change small Python state; newcomers read a copy of these.
"""

import threading
from collections.abc import Callable

import torch

from regrow.core.errors import StateError
from regrow.core.ids import StepNo
from regrow.hydration.inventory import Inventory
from regrow.train.state.protected import ProtectedState


class FrozenState:
    """A `StateSource` over protected state, as it was when `freeze` was called.

    Args:
        state: the state that is read.
        wait: returns when all work that the calling thread has enqueued on its device is done. Readers are other
            threads, whose streams do not wait for the script's streams.
    """

    def __init__(self, state: ProtectedState, wait: Callable[[], None]) -> None:
        self._state = state
        self._wait = wait
        self._lock = threading.Lock()
        self._inventory: Inventory | None = None
        self._table: dict[str, torch.Tensor] = {}

    def freeze(self, step: StepNo, *, whole_body: bool = False) -> None:
        """Freeze `state@step` for readers. Called from the training thread while nothing else runs.

        Args:
            step: the step at which the state is.
            whole_body: the next body may change parameters before newcomers are done, so these are copied too.
        """
        self._wait()
        state = self._state
        state.state_at = step
        inventory = state.inventory(step)
        table = {entry.name: state.tensor(entry.name) for entry in inventory.entries}
        changed_by_updates = set() if whole_body else state.changed_by_updates()
        with torch.no_grad():
            table = {name: t if name in changed_by_updates else t.detach().clone() for name, t in table.items()}
        self._wait()
        with self._lock:
            self._inventory, self._table = inventory, table

    def thaw(self) -> None:
        """Let nothing be read any more, as the state is about to change."""
        with self._lock:
            self._inventory, self._table = None, {}

    def inventory(self, step: StepNo) -> Inventory:
        """Inventory of the frozen state. Raises `StateError` if it is not at `step`."""
        with self._lock:
            if self._inventory is None or self._inventory.step != step:
                raise StateError(f"state@{step} was asked for; this worker's is not there")
            return self._inventory

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor of the inventory. Raises `StateError` for a name that is not in it."""
        with self._lock:
            tensor = self._table.get(name)
        if tensor is None:
            raise StateError(f"{name} is not part of the state that is offered")
        return tensor
