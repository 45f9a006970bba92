"""A small training whose state is written to disk the way a job does it: snapshot in shared memory, parts, finish."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn

from regrow.core.ids import Rank, StepNo
from regrow.hydration.copies.segment import Segment
from regrow.hydration.durable import snapshot
from regrow.hydration.durable.layout import KEEP
from regrow.hydration.durable.reader import load
from regrow.hydration.durable.snapshot import SegmentSource
from regrow.hydration.durable.storage import CheckpointStorage, place
from regrow.hydration.durable.writer import finish, write_parts
from regrow.hydration.inventory import Inventory, TensorEntry
from regrow.hydration.shards import Box
from regrow.train.state.protected import ProtectedState


class Training:
    """Dtypes, buffers and lazily made optimizer state; `step(n)` goes from state@n to the next."""

    def __init__(self, seed: int = 0, width: int = 30) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.Linear(width, 2).bfloat16())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.state = ProtectedState([self.model, self.optimizer, self.scheduler])
        self.state.state_at = StepNo(0)

    def step(self, number: int) -> None:
        torch.manual_seed(number)
        hidden = self.model[1](self.model[0](torch.randn(16, 8)))
        self.model[2](hidden.bfloat16()).float().pow(2).mean().backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.state.state_at = StepNo(number + 1)

    def trained(self, steps: int = 3) -> "Training":
        for number in range(steps):
            self.step(number)
        return self

    def snapshot(self, rank: int = 0, holding: str = "all") -> Segment:
        segment = Segment.create()
        snapshot.take(segment, self.state, self.state.state_at, Rank(rank), holding)
        return segment


def save(at: CheckpointStorage, segments: Sequence[Segment], step: int, *, attempt: int = 0, keep: int = KEEP) -> str:
    """One checkpoint, all parts by one writer; its name."""
    sources = [source(segment, step) for segment in segments]
    write_parts(at, StepNo(step), attempt, sources)
    return finish(at, StepNo(step), attempt, [each.rank for each in sources], keep).folder


def source(segment: Segment, step: int) -> SegmentSource:
    """The segment as another process sees it."""
    return SegmentSource(Segment.attach(f"/proc/{os.getpid()}/fd/{segment.descriptor}"), StepNo(step))


def saved(folder: Path, training: Training, **more: int) -> str:
    """The state of a world of one on disk."""
    return save(place(str(folder)), [training.snapshot()], training.state.state_at, **more)


def loaded(folder: Path, name: str, training: Training) -> StepNo:
    """Read it back into another training."""
    return load(training.state, place(str(folder)), name, holding="all")


class Pieces:
    """Part of some tensors that one rank has: a source and a sink without a model."""

    def __init__(self, rank: int, tensors: dict[str, torch.Tensor], boxes: dict[str, Box | None]) -> None:
        self.rank, self.holding = Rank(rank), f"holding-{rank}"
        self.step = StepNo(5)
        self.whole = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self.boxes = boxes
        self.tensors = {name: cut(tensors[name], box) for name, box in boxes.items()}
        self.python = f"python of rank {rank}".encode()
        self.finished = False

    @property
    def entries(self) -> list[TensorEntry]:
        made = []
        for name in sorted(self.tensors):
            entry, box = TensorEntry.of(name, self.tensors[name]), self.boxes[name]
            whole = None if box is None else self.whole[name]
            made.append(TensorEntry(entry.name, entry.dtype, entry.shape, entry.nbytes, "cpu", box, whole))
        return made

    def inventory(self, step: StepNo) -> Inventory:
        return Inventory(step, self.entries, self.python)

    def tensor(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    def snapshot(self) -> Segment:
        segment = Segment.create()
        snapshot.take(segment, self, self.step, self.rank, self.holding)
        return segment

    def piece(self, entry: TensorEntry) -> TensorEntry:
        return next(each for each in self.entries if each.name == entry.name)

    def prepare(self, inventory: Inventory) -> dict[str, torch.Tensor]:
        self.step, self.python = inventory.step, inventory.python
        assert inventory.entries == self.entries
        for tensor in self.tensors.values():
            tensor.zero_()
        return dict(self.tensors)

    def finish(self) -> None:
        self.finished = True


def cut(tensor: torch.Tensor, box: Box | None) -> torch.Tensor:
    """A rank's piece, in memory of its own."""
    return tensor.clone() if box is None else tensor[tuple(slice(a, b) for a, b in box)].clone()


def rows(size: int, ranks: int, rank: int) -> tuple[int, int]:
    """The rows of a rank, dealt out as `torch.chunk` does: the last ranks may get fewer, or none."""
    each = -(-size // ranks)
    return min(rank * each, size), min((rank + 1) * each, size)


Damage = Callable[[Path], None]
