"""A small DDP training with habits that scripts on an accelerator have: `--habits` says which.

On a processor the same is done at once, so that its losses and its state are the reference.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from pacing import pause  # type: ignore[import-not-found]  # beside this script
from placing import DEVICE, take_place  # type: ignore[import-not-found]
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import regrow

LATE = DEVICE.type != "cpu"
parser = argparse.ArgumentParser()
parser.add_argument("--habits", default="")
parser.add_argument("--steps", type=int, default=16)
parser.add_argument("--pace", type=float, default=0.0, help="see pacing.py")
parser.add_argument("--out", type=Path)
args = parser.parse_args()
habits = set(args.habits.split(",")) - {""}

session = regrow.init(seed=3)
take_place(lambda: session.local_rank)
last = nn.Linear(64, 1)
net = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), last).to(DEVICE)
model = DistributedDataParallel(net, bucket_cap_mb=0.002)
how: dict[str, Any] = {name: True for name in ("foreach", "fused") if name in habits}
if "capturable" in habits and LATE:
    how["capturable"] = True
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **how)
scaler = torch.amp.GradScaler(DEVICE.type, init_scale=8.0, growth_interval=3, enabled="amp" in habits)


class Averages:
    """Averages of the weights, made on a stream of their own that the next step's update waits for."""

    def __init__(self) -> None:
        self.stream = torch.Stream(device=DEVICE) if LATE else None
        self.values = [p.detach().clone() for p in net.parameters()]
        self.done: torch.Event | None = None

    def begin(self) -> None:
        """Average in, behind the update."""
        if self.stream is None:
            self._add()
            return
        updated = torch.accelerator.current_stream().record_event()
        self.stream.wait_event(updated)
        with self.stream:
            self._add()
        self.done = self.stream.record_event()

    def _add(self) -> None:
        with torch.no_grad():
            for mine, p in zip(self.values, net.parameters(), strict=True):
                for _ in range(20):
                    mine.lerp_(p, 0.05)

    def join(self) -> None:
        """The weights may be changed, and the averages read."""
        if self.done is not None:
            torch.accelerator.current_stream().wait_event(self.done)

    def state_dict(self) -> dict[str, Any]:
        """As of now: what is on its way is still to come."""
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take them."""
        self.values = state["values"]


class Echo:
    """A norm of the step before, copied into page-locked memory without a wait; the next step reads it."""

    def __init__(self) -> None:
        self.here = torch.zeros(1, pin_memory=LATE)
        self.there: torch.Event | None = None

    def send(self, number: torch.Tensor) -> None:
        """Begin the copy."""
        self.here.copy_(number.detach().reshape(1), non_blocking=True)
        self.there = torch.accelerator.current_stream().record_event() if LATE else None

    def read(self) -> float:
        """The number, once it is there."""
        if self.there is not None:
            self.there.synchronize()
        return float(self.here)

    def state_dict(self) -> dict[str, Any]:
        """The memory as it is."""
        return {"here": self.here}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it."""
        self.here = state["here"]


class Difficulty:
    """Weights of samples, on the device, by which the data is drawn: no module, and no state of its own to say."""

    def __init__(self) -> None:
        self.weights = torch.ones(240, device=DEVICE)

    def state_dict(self) -> dict[str, Any]:
        """The weights."""
        return {"weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take them."""
        self.weights = state["weights"]


averages, echo, difficulty = Averages(), Echo(), Difficulty()
noise = torch.Generator(device=DEVICE)
session.protect(model, optimizer, scaler, noise, averages=averages, echo=echo, difficulty=difficulty)
numbers = torch.Generator().manual_seed(5)
inputs = torch.randn(240, 16, generator=numbers)
targets = inputs.sum(1, keepdim=True).sin()
inputs, targets = inputs.to(DEVICE), targets.to(DEVICE)


def batch(step: int, rank: int | None = None) -> torch.Tensor:
    """Numbers of samples, on the device; for this rank, or another."""
    source = torch.Generator().manual_seed(1000 * step + (session.rank if rank is None else rank))
    return torch.randint(240, (6,), generator=source).to(DEVICE, non_blocking=True)


for step in session.steps(batch, until=args.steps):
    with step as chosen:
        pause(0.0 if step.rehearsal else args.pace, step.number, args.steps)
        x, y = inputs[chosen], targets[chosen]
        if "noise" in habits:
            x = x + 0.1 * torch.randn(x.shape, generator=noise, device=DEVICE)
        loss = nn.functional.mse_loss(model(x), y, reduction="none").squeeze(1)
        if "data" in habits:
            loss = loss * difficulty.weights[chosen]
        loss = loss.mean()
        if "echo" in habits:
            loss = loss * (1 + 0.01 * echo.read())
            echo.send(2 * last.weight.norm())
        if "side" in habits:
            averages.join()
            loss = loss + 1e-3 * sum(a.square().sum() for a in averages.values)
        step.log(loss=loss)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if "data" in habits:
            difficulty.weights[batch(step.number, rank=0)] *= 0.9
        if "echo" in habits:
            echo.send(last.weight.norm())
        if "side" in habits:
            averages.begin()

if args.out is not None:
    averages.join()
    args.out.with_suffix(f".{session.rank}.json").write_text(json.dumps({"digest": session.digest()}))
