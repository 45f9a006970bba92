"""Scripts keep values around their loop in objects of every kind: one of each, changed in each body."""

import argparse
import dataclasses
import functools
import itertools
import json
from collections import defaultdict, deque
from collections.abc import Callable
from datetime import datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import regrow

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--out", type=Path)
parser.add_argument("--since", type=int, default=0, help="the first step that changes anything")
args = parser.parse_args()


class Meter:
    """A sum that waits for nobody, and parts of it."""

    def __init__(self) -> None:
        self.total, self.count = torch.zeros(()), torch.zeros(2)
        self.first: torch.Tensor | None = None
        self.recent: deque[torch.Tensor] = deque(maxlen=3)

    def add(self, value: torch.Tensor) -> None:
        self.total = self.total + value
        self.count[0] += 1
        self.first = value.clone() if self.first is None else self.first + value
        self.recent.append(value)


class Ema:
    """Averages of weights, kept by name."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = {name: each.detach().clone() for name, each in model.named_parameters()}

    def update(self, model: nn.Module) -> None:
        for name, each in model.named_parameters():
            self.shadow[name].mul_(0.9).add_(each.detach(), alpha=0.1)


@dataclasses.dataclass
class Stats:
    """A data class."""

    sum: torch.Tensor = dataclasses.field(default_factory=lambda: torch.zeros(3))
    mean: Any = dataclasses.field(default_factory=lambda: np.zeros(4))
    big: Any = dataclasses.field(default_factory=lambda: torch.zeros(20_000))


@dataclasses.dataclass(frozen=True)
class Frozen:
    """Made anew by each body."""

    total: torch.Tensor
    count: int = 0


class Pair(NamedTuple):
    """Made anew by each body."""

    total: torch.Tensor
    number: int


class Exact:
    """Values that do not change in their places."""

    def __init__(self) -> None:
        self.money, self.part = Decimal("1.10"), Fraction(1, 3)
        self.day, self.each = datetime(2020, 1, 1), timedelta(hours=1)


class Options:
    """On a class."""

    scale = torch.ones(2)


class Late:
    """Has something that only a later step makes."""

    def __init__(self) -> None:
        self.meter: Meter | None = None


def closed() -> Callable[[float], torch.Tensor]:
    total = torch.zeros(1)

    def add(value: float) -> torch.Tensor:
        nonlocal total
        total = total + value
        return total

    return add


class Holder:
    """Holds what is protected, too."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.total, self.sum = model, torch.zeros(()), torch.zeros(2)
        self.losses: list[torch.Tensor] = []
        self.names: dict[str, list[Pair]] = {"pairs": []}


@functools.cache
def cached(kind: str) -> list[float]:
    """A list that the cache alone holds."""
    return []


torch.set_num_threads(1)
session = regrow.init(seed=3)
model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
session.protect(model, optimizer)
data = torch.randn(240, 16, generator=torch.Generator().manual_seed(5))
loader = DataLoader(TensorDataset(data, data.sum(1, keepdim=True).sin()), batch_size=6, shuffle=True)

meter, ema, stats, frozen, pair = Meter(), Ema(model), Stats(), Frozen(torch.zeros(2)), Pair(torch.zeros(2), 0)
exact, late, add, holder, history = Exact(), Late(), closed(), Holder(model), [0.0] * 1_500
meters: dict[str, Meter] = defaultdict(Meter)
part, counter = Meter(), itertools.count()


def change(number: int) -> None:
    """One of each."""
    global frozen, pair, part
    value = torch.tensor(float(number + 1))
    meter.add(value)
    ema.update(model)
    stats.sum = stats.sum * 0.9 + value
    stats.mean += number
    stats.big[number] = number
    frozen = Frozen(frozen.total + value, frozen.count + 1)
    pair = Pair(pair.total + value, pair.number + 1)
    exact.money, exact.part, exact.day = exact.money * 2, exact.part + Fraction(1, 7), exact.day + exact.each
    Options.scale = Options.scale * 0.9
    add(float(number))
    holder.total = holder.total + value
    holder.sum += value
    holder.losses.append(value)
    holder.names["pairs"].append(pair)
    history.append(float(number))
    meters["loss"].add(value)
    if number >= 4:
        late.meter = late.meter or Meter()
        late.meter.add(value)
    if number % 5 == 4:
        part = Meter()
    part.add(value)
    if args.since:
        next(counter)
    cached("losses").append(float(number))


def shown(value: Any) -> Any:
    """A number, or a list of them."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return [float(each) for each in value.reshape(-1)][:40]
    if isinstance(value, list | tuple | deque):
        return [shown(each) for each in value][-40:]
    if isinstance(value, dict):
        return {key: shown(each) for key, each in value.items()}
    return str(value) if not hasattr(value, "__dict__") else shown(vars(value))


for step in session.steps(loader, until=args.steps):
    with step as (x, y):
        if step.number >= args.since:
            change(step.number)
        scale = 1 + (meter.total + stats.sum.sum() + frozen.total.sum()) / 1000
        loss = nn.functional.mse_loss(model(x), y) * scale
        step.log(loss=loss)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

if args.out is not None:
    names = ["meter", "ema", "stats", "frozen", "pair", "exact", "late", "history", "meters", "part"]
    held = [holder.total, holder.sum, holder.losses, holder.names["pairs"]]
    final = {name: shown(globals()[name]) for name in names}
    final |= {
        "options": shown(Options.scale),
        "closed": shown(add(0.0)),
        "holder": shown([holder.total, holder.sum, holder.losses, holder.names["pairs"]]),
    }
    final |= {"counter": next(counter), "cached": shown(cached("losses"))}
    args.out.with_suffix(f".{session.rank}.json").write_text(json.dumps({"digest": session.digest(), **final}))
