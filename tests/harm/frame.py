"""Frame of all habits: a tiny net, its data, and a session that is regrow's or plain torch's.

A habit is a function of a `Trial`. It trains as its author would write it, and returns its result. The same function
runs under `regrow run`, alone under `python`, and in a world of plain torch.distributed without regrow.
"""

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import regrow
from regrow.data.loader import StepLoader
from regrow.data.seeding import seed_everything

SEED = 7
WIDTH = 8
SAMPLES = 4
GLOBAL_BATCH = 12
"""Samples of a step in all ranks together, where the world changes; as many in each rank of 1, 2, 3 or 4."""
SIZES = (2, 3, 2)
"""The worlds of a habit that is grown and shrunk."""
LONGER = 3
"""Factor of the steps if the world changes."""
PACED, PACE_S, PATIENCE_S = 4, 0.3, 120.0
Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass
class PlainStep:
    """A step of a script that knows nothing of faults."""

    number: int
    batch: Any
    rank: int
    logs: list[tuple[int, str, float]]
    committed: bool = False
    rehearsal: bool = False
    microbatches: Any = ()

    def __enter__(self) -> Any:
        seed_everything(SEED, self.number, self.rank)
        return self.batch

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.committed = error is None

    def log(self, **metrics: Any) -> None:
        """Keep numbers."""
        self.logs.extend((self.number, name, float(value)) for name, value in metrics.items())

    def update(self) -> None:
        """Nothing to declare."""


@dataclass
class PlainMicroBatch:
    """A part of a step's global batch."""

    batch: Any
    part: float
    """Of the mean over the world, of which DDP makes another mean over its ranks."""
    losses: dict[str, list[float]]

    def log(self, **metrics: Any) -> None:
        """Keep numbers."""
        for name, value in metrics.items():
            self.losses.setdefault(name, []).append(float(value))

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient."""
        backward(loss * self.part)


class PlainSession:
    """torch.distributed without regrow, in the shape of a session: what a habit does here is what it does anywhere."""

    def __init__(self) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.local_rank = self.rank
        self.is_main = self.rank == 0
        self.logs: list[tuple[int, str, float]] = []
        self._objects: tuple[Any, ...] = ()

    def protect(self, *objects: Any, **named: Any) -> None:
        """Nothing survives."""
        self._objects = objects

    def steps(self, loader: Any, *, until: int, start: int = 0, microbatches: int = 0) -> Iterator[PlainStep]:
        """The loop that torch's tutorials have."""
        batches = self._batches(loader) if not microbatches else iter(())
        for number in range(start, until):
            step = PlainStep(number, next(batches, None), self.rank, self.logs)
            step.microbatches = self._parts(step, loader, microbatches)
            yield step

    def _parts(self, step: PlainStep, loader: Any, count: int) -> Iterator[PlainMicroBatch]:
        mine = list(range(count))[self.rank :: self.world_size]
        losses: dict[str, list[float]] = {}
        for at in mine:
            with self._objects[0].no_sync() if at != mine[-1] else nullcontext():
                yield PlainMicroBatch(loader(step.number, at), self.world_size / count, losses)
        for name, values in losses.items():
            dist.all_reduce(total := torch.tensor(sum(values)))
            step.log(**{name: total / count})

    def _batches(self, loader: Any) -> Iterator[Any]:
        if callable(loader):
            yield from map(loader, range(10_000))
        if isinstance(loader, DataLoader):  # regrow's order of samples, since that is what is compared
            source = StepLoader(loader, seed=SEED)
            yield from (source.batch(number, self.rank, self.world_size) for number in range(10_000))
        while True:
            yield from loader


class Struck:
    """A step that ends its process once, just behind its body."""

    def __init__(self, step: Any, strike: Callable[[str, Any], None]) -> None:
        self._step, self._strike = step, strike

    def __enter__(self) -> Any:
        return self._step.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        absorbed = bool(self._step.__exit__(kind, error, trace))
        self._strike("left", self._step)
        return absorbed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._step, name)


@dataclass
class Turn:
    """One epoch."""

    epoch: Any
    steps: Iterator[Any]

    @property
    def number(self) -> int:
        """Number of the epoch."""
        return int(getattr(self.epoch, "number", self.epoch))

    def __iter__(self) -> Iterator[Any]:
        return self.steps


@dataclass
class Trial:
    """Surroundings of a habit.

    Attributes:
        session: regrow's, or torch's in its shape.
        folder: shared by all ranks of this run, for files that the habit writes.
        until: steps.
        strikes: (place, rank, step) at which this process is to be killed, each once.
        paced: steps since the world has had its size, and that.
        world: "still" or "changing" if the data is of a global batch, as a world that changes needs it.
    """

    session: Any
    folder: Path
    until: int = 12
    strikes: list[tuple[str, int, int]] = field(default_factory=list)
    world: str = ""
    paced: tuple[int, int] = (0, 0)

    def steps(self, loader: Any = None, *, until: int | None = None, **words: Any) -> Iterator[Any]:
        """The session's steps, over the common data unless a loader is given."""
        if loader is None:
            loader = global_batches() if self.world else self.batch
        steps = self.session.steps(loader, until=until or self.until, **words)
        if self.world == "changing":
            return self._changing(steps)
        return steps if not self.strikes else self._struck(steps)

    def epochs(self, count: int, length: int) -> Iterator["Turn"]:
        """The session's epochs over the common data, of `length` steps each."""
        loader = global_batches() if self.world else self.batch
        if isinstance(self.session, PlainSession):
            steps = self.session.steps(loader, until=count * length)
            yield from (Turn(number, itertools.islice(steps, length)) for number in range(count))
            return
        for epoch in self.session.epochs(loader, count, length=length):
            given: Iterator[Any] = iter(epoch)
            if self.world == "changing":
                given = self._changing(given)
            yield Turn(epoch, given if not self.strikes else self._struck(given))

    def _struck(self, steps: Iterator[Any]) -> Iterator[Any]:
        for step in steps:
            yield Struck(step, self.strike)
            self.strike("between", step)

    def _changing(self, steps: Iterator[Any]) -> Iterator[Any]:
        for step in steps:
            yield step
            if step.rehearsal:
                continue
            before, size = self.paced[1], dist.get_world_size()
            self.paced = (self.paced[0] + 1 if size == before else 1), size
            self._linger(self.paced[0])

    def _linger(self, paced: int) -> None:
        """Make steps slow while the world is to change, and wait until the test has the order for it."""
        orders = sum(self._ordered(each).exists() for each in range(1, len(SIZES)))
        if dist.get_world_size() != SIZES[orders]:
            time.sleep(PACE_S / 2)  # who is too fast comes to the agreed step before its order does
        elif orders < len(SIZES) - 1:
            time.sleep(PACE_S)
            deadline = time.monotonic() + PATIENCE_S
            while paced >= PACED and not self._ordered(orders + 1).exists():
                if time.monotonic() > deadline:
                    raise TimeoutError(f"nobody has asked for {SIZES[orders + 1]} ranks")
                time.sleep(0.01)

    def _ordered(self, number: int) -> Path:
        return self.folder / f"ordered-{number}"

    def strike(self, place: str, step: Any) -> None:
        """End this process here, if it is to be struck here and was not yet."""
        rank = self.session.rank
        if step.rehearsal or (place, rank, step.number) not in self.strikes:
            return
        with suppress(FileExistsError):
            (self.folder / f"struck-{place}-{rank}-{step.number}").touch(exist_ok=False)
            os.kill(os.getpid(), signal.SIGKILL)

    def batch(self, number: int) -> Batch:
        """The common data: a function of the step and the rank."""
        return batch(number * 97 + self.session.rank)


def batch(seed: int, samples: int = SAMPLES) -> Batch:
    """A few rows whose targets a small net can learn."""
    inputs = torch.randn(samples, WIDTH, generator=torch.Generator().manual_seed(seed))
    return inputs, inputs.sum(1, keepdim=True).sin()


def global_batches() -> regrow.DataLoader[Any]:
    """The same samples in each step, whatever the world."""
    return regrow.DataLoader(TensorDataset(*batch(3, 16 * GLOBAL_BATCH)), global_batch_size=GLOBAL_BATCH, shuffle=True)


def mlp(seed: int = 1, inputs: int = WIDTH, outputs: int = 1, *middle: nn.Module) -> nn.Sequential:
    """The tiny net, the same on all ranks."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, 16), nn.Tanh(), *middle, nn.Linear(16, outputs))


def ddp(module: nn.Module, **words: Any) -> DistributedDataParallel:
    """Wrapped for data parallel training; small buckets, so that a step has several reductions."""
    return DistributedDataParallel(module, **{"bucket_cap_mb": 0.0003, **words})


def mse(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The common loss."""
    return nn.functional.mse_loss(outputs, targets)


def backward(loss: torch.Tensor) -> None:
    """`loss.backward()`, which torch has no types for."""
    loss.backward()  # type: ignore[no-untyped-call]


def play(habit: Callable[[Trial], Mapping[str, Any]], trial: Trial) -> None:
    """Run a habit and leave its result, one file a rank."""
    torch.manual_seed(0)
    kept = flat(habit(trial))
    logs = getattr(trial.session, "logs", [])
    torch.save({"kept": kept, "logs": logs}, trial.folder / f"final.{trial.session.rank}.pt")


def begin(
    folder: Path,
    *,
    until: int = 12,
    strikes: list[tuple[str, int, int]] | None = None,
    world: str = "",
    invariant: bool = False,
) -> Trial:
    """A trial in a job of regrow's, or alone."""
    torch.set_num_threads(1)
    return Trial(regrow.init(seed=SEED, invariant=invariant), folder, until, strikes or [], world)


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """Every leaf of what a habit returns, under its path."""
    if isinstance(value, torch.Generator):
        return {name: value.get_state()}
    if hasattr(value, "state_dict"):
        return flat(value.state_dict(), name)
    if isinstance(value, Mapping):
        return {key: leaf for at, each in value.items() for key, leaf in flat(each, f"{name}/{at}").items()}
    if isinstance(value, list | tuple):
        return {key: leaf for at, each in enumerate(value) for key, leaf in flat(each, f"{name}/{at}").items()}
    return {name: value.detach().clone() if isinstance(value, torch.Tensor) else value}
