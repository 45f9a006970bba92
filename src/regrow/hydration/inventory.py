"""What state there is: the words in which a holder and a receiver speak of it."""

from typing import Protocol

import msgspec
import torch

from regrow.core.errors import StateError
from regrow.core.ids import StepNo
from regrow.hydration.codec import dtype_name


class TensorEntry(msgspec.Struct, frozen=True, array_like=True):
    """One tensor. `device_type`: where the holder has it (`cpu`, `cuda`): a receiver that must make it follows."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    device_type: str

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> "TensorEntry":
        """The entry of a tensor. Raises `StateError` where its values are not one plain block of numbers."""
        sharded = hasattr(tensor, "__tensor_flatten__") or hasattr(tensor, "device_mesh")
        if sharded or tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
            raise StateError(
                f"{name} is a {type(tensor).__name__} on {tensor.device} with layout {tensor.layout}",
                hint="only dense tensors with memory of their own can be protected",
            )
        return cls(name, dtype_name(tensor.dtype), tuple(tensor.shape), tensor.nbytes, tensor.device.type)


class Inventory(msgspec.Struct, frozen=True):
    """All that makes up `state@step`. `entries` are sorted by name; `python`: the small state (`codec`)."""

    step: StepNo
    entries: list[TensorEntry]
    python: bytes

    @property
    def nbytes(self) -> int:
        """Bytes in all tensors."""
        return sum(entry.nbytes for entry in self.entries)


class StateSource(Protocol):
    """Who has state. Called from threads of the server, but only while the state is offered and stands still."""

    def inventory(self, step: StepNo) -> Inventory:
        """What there is. Raises `StateError` if the state does not stand at `step`."""
        ...

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor of the last inventory, itself and no copy. Raises `StateError` for a name not in it."""
        ...


class StateSink(Protocol):
    """Who wants state. Between `prepare` and `finish` its state is torn."""

    def prepare(self, inventory: Inventory) -> dict[str, torch.Tensor]:
        """A tensor to write into for every entry, made where it does not exist yet.

        Raises `StateError`, naming the tensor, where the two sides do not fit; nothing was changed then.
        """
        ...

    def finish(self) -> None:
        """Every tensor has arrived: put new tensors and the Python state of the inventory into place."""
        ...
