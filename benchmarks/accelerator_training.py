"""SIDE FILE: a small model that trains on the tests' stand-in device on command; SIDE is `plain` or `regrow`.

It writes its losses and a digest of its parameters to FILE. Two ranks average their gradients on the host, so both
sides have the same work, and the same waits by the script; with `TURN_DDP=1`, DistributedDataParallel does this work
over groups of the device's own, and the script never waits.
"""

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

NAME = os.environ.get("REGROW_TEST_DEVICE", "cpu")
if NAME == "standin":
    from tests.standin import device as standin

    STEERING = standin.load()
DEVICE = torch.device(NAME)
DDP = os.environ.get("TURN_DDP") == "1"
ROUNDS, BLOCK = int(os.environ["TURN_ROUNDS"]), int(os.environ["TURN_BLOCK"])
STEPS = ROUNDS * BLOCK
WIDTH, LAYERS, BATCH = 32, 5, 8
SETTLED = 4
"""Steps after which a step's launches are counted and become the limit of the queue."""


class Device:
    """Counters of this rank's device; all 0 on the CPU."""

    def __init__(self) -> None:
        self._steering = STEERING if NAME == "standin" else None
        self.slept = 0
        """Number of regrow's waits that poll instead of blocking in the device's call."""

    @property
    def _at(self) -> int:
        return torch.accelerator.current_device_index()

    def waits(self) -> int:
        """Number of host waits so far."""
        return self.slept + (self._steering.waits(self._at) if self._steering is not None else 0)

    def launches(self) -> int:
        """Number of kernels and copies so far."""
        return self._steering.launches(self._at) if self._steering is not None else 0

    def queued(self) -> int:
        """Length of the queue, in launches."""
        return self._steering.depth(self._at) if self._steering is not None else 0

    def limit(self, launches: int) -> None:
        """Limit the number of queued launches of a stream."""
        if self._steering is not None:
            self._steering.queue_limit(launches)

    def drain(self) -> None:
        """Wait for all queued work."""
        if self._steering is not None:
            torch.accelerator.synchronize()

    def count_sleeps(self) -> None:
        """Also count the waits of regrow that poll."""
        from regrow.devices import stream_points

        wait = stream_points.StreamPoint.wait

        def counted(point: stream_points.StreamPoint, *given: Any, **named: Any) -> float:
            self.slept += not point.passed()
            return wait(point, *given, **named)

        setattr(stream_points.StreamPoint, "wait", counted)  # noqa: B010  a plain assignment is no method to mypy


class Turns:
    """Runs blocks of steps on request; only rank 0 is requested, and the others follow it."""

    def __init__(self, device: Device, rank: int) -> None:
        self._device, self._rank, self._count = device, rank, 0
        if rank == 0:
            self._go, self._done = open(os.environ["TURN_GO"]), open(os.environ["TURN_DONE"], "w")  # noqa: SIM115

    def before(self) -> None:
        """Wait for the request, if the next step starts a block."""
        if self._count == SETTLED:
            self._launches = self._device.launches()
        if self._count == SETTLED + 1:
            self._device.limit(max(1, self._device.launches() - self._launches))
        if self._rank == 0 and self._count % BLOCK == 0:
            self._go.readline()
            self._device.drain()
            self._waits, self._queued, self._began = self._device.waits(), 0, time.perf_counter()

    def after(self) -> None:
        """Report milliseconds, waits and queue length a step, if the last step ended a block."""
        self._count += 1
        if self._rank == 0:
            self._queued += self._device.queued()
        if self._rank == 0 and self._count % BLOCK == 0:
            waits = self._device.waits() - self._waits
            self._device.drain()
            took = 1e3 * (time.perf_counter() - self._began) / BLOCK
            self._done.write(f"{took} {waits / BLOCK} {self._queued / BLOCK}\n")
            self._done.flush()


class Training:
    """The model, and its training step."""

    def __init__(self, world: int, reduce: Callable[[Tensor], None]) -> None:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()) for _ in range(LAYERS)]
        self.model: nn.Module = nn.Sequential(*layers, nn.Linear(WIDTH, 1)).to(DEVICE)
        if DDP:
            self.model = DistributedDataParallel(self.model, bucket_cap_mb=0.01)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self._world, self._reduce = world, reduce

    def step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """One update; the loss stays on the device."""
        x, y = (each.to(DEVICE, non_blocking=True) for each in batch)
        loss = nn.functional.mse_loss(self.model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        if self._world > 1 and not DDP:
            self._average()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def _average(self) -> None:
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        flat = torch.cat([each.reshape(-1) for each in gradients]).cpu()
        self._reduce(flat)
        there = (flat / self._world).to(DEVICE)
        for gradient, mean in zip(gradients, torch.split(there, [each.numel() for each in gradients]), strict=True):
            gradient.copy_(mean.view_as(gradient))

    def tell(self, losses: list[float]) -> None:
        """Write the losses and the digest."""
        digest = hashlib.sha256()
        for tensor in self.model.state_dict().values():
            digest.update(tensor.cpu().numpy().tobytes())
        Path(sys.argv[2]).write_text(json.dumps({"losses": losses, "digest": digest.hexdigest()}))


def batch_of(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """The batch of a step and a rank, the same on all sides."""
    numbers = torch.Generator().manual_seed(97 * step + rank)
    x = torch.randn(BATCH, WIDTH, generator=numbers)
    return x, x.sum(1, keepdim=True).sin()


def take_device(rank: int) -> None:
    """Select the rank's own device, which groups on the device need."""
    if DDP and NAME == "standin":
        torch.accelerator.set_device_index(rank)


def plain(rank: int, world: int) -> None:
    """Train without regrow."""
    take_device(rank)
    if world > 1:
        dist.init_process_group("cpu:gloo,standin:standinccl" if DDP and NAME == "standin" else "gloo")
    device = Device()
    training, turns, losses = Training(world, dist.all_reduce), Turns(device, rank), []
    for number in range(STEPS):
        turns.before()
        losses.append(training.step(batch_of(number, rank)).detach())
        turns.after()
    if rank == 0:
        training.tell([float(each) for each in losses])
    if world > 1 and not (DDP and NAME == "standin"):  # the stand-in's groups end with the process
        dist.destroy_process_group()


def under_regrow() -> None:
    """Train under regrow, which logs each loss."""
    import regrow

    device = Device()
    device.count_sleeps()
    session = regrow.init(seed=3)
    rank, world = session.rank, session.world_size
    take_device(rank)
    training, turns, losses = Training(world, dist.all_reduce), Turns(device, rank), []
    session.protect(training.model, training.optimizer)
    for step in session.steps(lambda number: batch_of(number, rank), until=STEPS, data=(0, 1)):
        if not step.rehearsal:
            turns.before()
        with step as batch:
            loss = training.step(batch)
            step.log(loss=loss)
        if not step.rehearsal:
            losses.append(loss.detach())
            turns.after()
    if rank == 0:
        training.tell([float(each) for each in losses])


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "regrow":
        under_regrow()
    else:
        plain(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))
