"""A rank's state for its durable checkpoint: a segment of shared memory, which the writer process reads."""

import msgspec
import torch

from regrow.core.errors import CheckpointError, StateError
from regrow.core.ids import Rank, StepNo
from regrow.hydration.codec import dtype_of
from regrow.hydration.copies.segment import Segment, layout
from regrow.hydration.copies.snapshot import fill
from regrow.hydration.inventory import Inventory, StateSource


class TornSnapshot(CheckpointError):
    """The state in shared memory was overwritten before it was on disk."""


class SegmentSource:
    """One rank's `state@step`, read in place from shared memory.

    Args:
        segment: shared memory that the rank's worker may overwrite at any moment.
        step: the step that should be in it.

    Raises:
        TornSnapshot: something else is in it.
    """

    def __init__(self, segment: Segment, step: StepNo) -> None:
        self._segment, self._step = segment, step
        self.check()
        try:
            head = segment.head()
            self._payload = segment.payload()
            self.inventory = msgspec.msgpack.decode(head.inventory, type=Inventory)
        except (StateError, msgspec.MsgspecError) as error:
            raise TornSnapshot(str(error)) from error
        self.rank: Rank = head.rank
        self.holding = head.holding
        offsets, _ = layout(entry.nbytes for entry in self.inventory.entries)
        self._places = {
            entry.name: (entry, offset) for entry, offset in zip(self.inventory.entries, offsets, strict=True)
        }

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor of the inventory, as a view of the shared memory."""
        entry, offset = self._places[name]
        dtype = dtype_of(entry.dtype)
        if entry.nbytes == 0:
            return torch.empty(entry.shape, dtype=dtype)
        raw = torch.frombuffer(self._payload, dtype=torch.uint8, offset=offset, count=entry.nbytes)
        return raw.view(dtype).reshape(entry.shape)

    @property
    def nbytes(self) -> int:
        """Size of the tensors and the Python state in bytes."""
        return self.inventory.nbytes + len(self.inventory.python)

    def check(self) -> None:
        """Raise `TornSnapshot` if any data read so far may belong to another step."""
        if self._segment.step != self._step:
            raise TornSnapshot(f"state@{self._step} was overwritten in shared memory before it was on disk")


def take(segment: Segment, source: StateSource, step: StepNo, rank: Rank, holding: str) -> int:
    """Copy `state@step` into a segment; returns the size of its tensors in bytes.

    Raises `StateError` if the state is at another step, `NoMemoryForCopy` if there is no memory for it.
    """
    inventory = source.inventory(step)
    _, payload = layout(entry.nbytes for entry in inventory.entries)
    room = segment.begin(rank, holding, msgspec.msgpack.encode(inventory), payload)
    fill(room, source, inventory)
    room.release()
    segment.publish(step)
    return inventory.nbytes
