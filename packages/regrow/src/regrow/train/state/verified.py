"""A private copy of the state that all replicas agreed on, to which all go back if they differ later."""

import torch
import xxhash

from regrow.core.errors import StateError
from regrow.core.ids import NO_STATE, StepNo
from regrow.devices.accelerators import host_memory, on_accelerator
from regrow.hydration.inventory import Inventory
from regrow.hydration.memory import copy_from_devices
from regrow.train.state.fingerprints import digest_tensors
from regrow.train.state.protected import ProtectedState


class VerifiedCopy:
    """One copy in host memory, which is renewed from time to time.

    Args:
        state: the state that is copied.
    """

    def __init__(self, state: ProtectedState) -> None:
        self._state = state
        self._inventory: Inventory | None = None
        self._tensors: dict[str, torch.Tensor] = {}
        self._left_out: frozenset[str] = frozenset()
        self._seals = b"", b""
        self.step: StepNo = NO_STATE
        """Step of the copy; `NO_STATE` while there is none."""

    @property
    def nbytes(self) -> int:
        """Memory in use for tensors."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def take(self, step: StepNo, seal: bytes, left_out: frozenset[str]) -> None:
        """Copy `state@step`, which must not change meanwhile.

        Args:
            seal: the digest of its tensors on which replicas agreed, by `digest_tensors`.
            left_out: tensors that the digest leaves out.
        """
        self.step, self._state.state_at = NO_STATE, step
        inventory = self._state.inventory(step)
        former, self._tensors = self._tensors, {}
        with torch.no_grad():
            for entry in inventory.entries:
                here = self._state.tensor(entry.name).detach()
                room = former.get(entry.name)
                if room is None or room.shape != here.shape or room.dtype != here.dtype:
                    # Not page-locked: torch rounds that up to a power of two, tensor by tensor.
                    room = host_memory(here.shape, here.dtype, None)
                self._tensors[entry.name] = room
                if not on_accelerator(here):
                    room.copy_(here)
            there = [entry.name for entry in inventory.entries if on_accelerator(self._state.tensor(entry.name))]
            rooms = {name: self._tensors[name].reshape(-1).view(torch.uint8) for name in there}
            copy_from_devices(self._state.tensor, rooms)
        self._inventory, self._left_out = inventory, left_out
        self._seals = seal, xxhash.xxh3_128_digest(inventory.python)
        self.step = step

    def check(self) -> None:
        """Check the copy against its digest. Raises `StateError`, and forgets the copy, if they differ."""
        inventory = self._inventory
        if inventory is None or self.step == NO_STATE:
            raise StateError("there is no verified copy of the state")
        seals = (
            digest_tensors(inventory.entries, self._tensors, self._left_out),
            xxhash.xxh3_128_digest(inventory.python),
        )
        if seals != self._seals:
            step, self.step = self.step, NO_STATE
            raise StateError(f"the verified copy of state@{step} has changed in memory", hint="this memory may be bad")

    def restore(self) -> None:
        """Set the protected state from the copy. Raises `StateError` if they do not fit."""
        if self._inventory is None:
            raise StateError("there is no verified copy of the state")
        targets = self._state.prepare(self._inventory)
        with torch.no_grad():
            for name, tensor in targets.items():
                tensor.detach().copy_(self._tensors[name])
        self._state.finish()
