"""Description of state, in the form in which a holder and a receiver exchange it."""

from collections.abc import Iterable
from typing import Protocol

import msgspec
import torch

from regrow.core.errors import StateError
from regrow.core.ids import StepNo
from regrow.hydration.codec import dtype_name
from regrow.hydration.shards import Box, box_of, local


class TensorEntry(msgspec.Struct, frozen=True, array_like=True):
    """Description of one tensor, or of the piece of it that a rank has.

    `shape`, `nbytes`: of the local piece. `device_type`: the holder's (`cpu`, ...); a receiver that must create the
    tensor uses the same. `box`: place of the piece in the whole tensor, None for a plain tensor; `whole`: with a box,
    the whole tensor's shape. Two ranks with the same name and box have the same values.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    device_type: str
    box: Box | None = None
    whole: tuple[int, ...] | None = None

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> "TensorEntry":
        """Describe a tensor. Raises `StateError` if the tensor's values are not one plain block of numbers."""
        box = box_of(tensor, name)
        here = local(tensor)
        if (
            hasattr(here, "__tensor_flatten__")
            or here.layout is not torch.strided
            or here.is_quantized
            or here.device.type == "meta"
        ):
            raise StateError(
                f"{name} is a {type(here).__name__} on {here.device} with layout {here.layout}",
                hint="only dense tensors with memory of their own, and DTensors of such, can be protected",
            )
        whole = None if box is None else tuple(tensor.shape)
        return cls(name, dtype_name(here.dtype), tuple(here.shape), here.nbytes, here.device.type, box, whole)


class Inventory(msgspec.Struct, frozen=True):
    """All parts of `state@step`. `entries` are sorted by name; `python`: the small Python state (`codec`).

    `variables`: the script's own plain variables, each encoded separately. They are not protected state: a rank may
    have values of its own, so they are not compared, and only those that are equal on all holders are used.
    """

    step: StepNo
    entries: list[TensorEntry]
    python: bytes
    variables: dict[str, bytes] = {}

    @property
    def nbytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(entry.nbytes for entry in self.entries)

    def agreed(self, others: Iterable["Inventory"]) -> "Inventory":
        """A copy of this inventory with only those variables that are equal in all others."""
        alike = set.intersection(set(self.variables.items()), *(set(other.variables.items()) for other in others))
        return msgspec.structs.replace(self, variables=dict(sorted(alike)))


class StateSource(Protocol):
    """Holder of state. Called from the server's threads, but only while the state is offered and does not change."""

    def inventory(self, step: StepNo) -> Inventory:
        """Inventory of the state. Raises `StateError` if the state is not at `step`."""
        ...

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor of the last inventory itself, not a copy. Raises `StateError` for an unknown name."""
        ...


class StateSink(Protocol):
    """Receiver of state. Between `prepare` and `finish` its state is torn."""

    def prepare(self, inventory: Inventory) -> dict[str, torch.Tensor]:
        """A tensor to write into for every entry, created if it does not exist yet.

        Raises `StateError`, which names the tensor, if the two sides do not match; then nothing was changed.
        """
        ...

    def finish(self) -> None:
        """Put new tensors and the Python state of the inventory into place, after every tensor has arrived."""
        ...
