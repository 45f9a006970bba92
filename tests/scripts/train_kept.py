"""Scripts keep many things around their loop that they do not protect: one of each, changed from the third step on."""

import argparse
import contextvars
import json
import os
import random
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import regrow

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--out", type=Path)
parser.add_argument("--in-body", action="store_true")
args = parser.parse_args()


class Config:
    """Options on a class."""

    temperature = 1.0


class EarlyStopping:
    """The class of many tutorials."""

    def __init__(self) -> None:
        self.best, self.counter, self.history = np.inf, 0, [0.0]

    def __call__(self, value: float) -> int:
        self.history.append(value)
        self.counter = 0 if value < self.best else self.counter + 1
        self.best = min(self.best, np.float64(value))
        return self.counter + len(self.history)


class Slotted:
    """Without a dictionary."""

    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


class Lazy:
    """Makes its teacher when it is first asked, which no rehearsal shows."""

    def __init__(self) -> None:
        self.loaded = False
        self.teacher: Any = None

    def __call__(self, value: float) -> float:
        if not self.loaded:
            self.teacher, self.loaded = nn.Threshold(0.0, 0.5), True
        return float(self.teacher(torch.tensor(value)))


def counter() -> Callable[[], int]:
    count = 0

    def counted() -> int:
        nonlocal count
        count += 1
        return count

    return counted


def gathered(value: float, kept: list[float] = []) -> int:  # noqa: B006
    kept.append(value)
    return len(kept)


def called() -> int:
    called.times = getattr(called, "times", 0) + 1  # type: ignore[attr-defined]
    return int(called.times)  # type: ignore[attr-defined]


early, slotted, counted, nested = EarlyStopping(), Slotted(), counter(), {"a": [types.SimpleNamespace(scale=1.0)]}
lazy, context, local = Lazy(), contextvars.ContextVar("context", default=0), threading.local()
drawn, numbers, noise = random.Random(5), np.random.default_rng(5), torch.Generator().manual_seed(5)
args.rate, local.calls = 1.0, 0
os.environ["SCALE"] = "0"


def change(number: int) -> float:
    """One of each; the sum says whether all of them are what they have to be."""
    Config.temperature *= 0.9
    slotted.calls += 1
    local.calls += 1
    args.rate *= 0.9
    nested["a"][0].scale *= 0.9
    context.set(context.get() + 1)
    os.environ["SCALE"] = str(int(os.environ["SCALE"]) + 1)
    if number == 4:
        torch.use_deterministic_algorithms(mode=True, warn_only=True)
    plain = [Config.temperature, slotted.calls, local.calls, args.rate, nested["a"][0].scale, context.get()]
    plain += [float(os.environ["SCALE"]), float(torch.are_deterministic_algorithms_enabled()), lazy(number)]
    return float(sum(plain)) + early(float(number)) + counted() + gathered(1.0) + called()


torch.set_num_threads(1)
session = regrow.init(seed=3)
model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.1), nn.Linear(32, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
session.protect(model, optimizer)
data = torch.randn(240, 16, generator=torch.Generator().manual_seed(5))
loader = DataLoader(TensorDataset(data, data.sum(1, keepdim=True).sin()), batch_size=6, shuffle=True)
weight = 0.0

for step in session.steps(loader, until=args.steps):
    with step as (x, y):
        if args.in_body and step.number >= 2:
            weight = change(step.number)
        loss = nn.functional.mse_loss(model(x), y) * (1 + weight / 100)
        step.log(loss=loss)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    if step.committed and not args.in_body and step.number >= 2:
        weight = change(step.number) + drawn.random() + float(numbers.random())
        weight += float(torch.rand((), generator=noise))

if args.out is not None:
    final = {"digest": session.digest(), "weight": weight}
    args.out.with_suffix(f".{session.rank}.json").write_text(json.dumps(final))
