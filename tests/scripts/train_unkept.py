"""Scripts keep values in forms that not everything can carry: one of each, changed in each body.

`CARRIED` come through a kill, `NAMED` are named where a rank is replaced, and `QUIET` are nothing to be named.
"""

import argparse
import array
import dataclasses
import enum
import functools
import itertools
import json
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import keeping  # type: ignore[import-not-found]
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


class Phase(enum.Enum):
    """The part of a training."""

    EARLY = enum.auto()
    LATE = enum.auto()


class Pair(NamedTuple):
    """Made anew by each body."""

    total: torch.Tensor
    number: int


class Item:
    """One of a list."""

    def __init__(self, number: int) -> None:
        self.number = number


@dataclasses.dataclass(slots=True)
class Slotted:
    """Without a dictionary."""

    count: int = 0
    mean: Any = dataclasses.field(default_factory=lambda: torch.zeros(2))


class Outer:
    """Has a class inside."""

    class Inner:
        """Counts on the class and in the object."""

        calls = 0

        def __init__(self) -> None:
            self.mine = 0


class Meter:
    """Values of many kinds."""

    def __init__(self) -> None:
        self.phase, self.path, self.dtype = Phase.EARLY, Path("none"), torch.float32
        self.pair, self.pairs = Pair(torch.zeros(2), 0), [Pair(torch.zeros(2), 0)]
        self.long, self.window, self.counts = [0.0] * 1_500, deque([0.0], maxlen=3), Counter[str]()
        self.lists: defaultdict[str, list[float]] = defaultdict(list)
        self.names, self.fixed, self.text, self.on = {"a"}, frozenset({"a"}), "", False
        self.scalar, self.point = np.float32(0.0), torch.tensor(0.0)
        self.cells = {(0, 1): 0.0}
        self.losses, self._rate, self.order = np.zeros(0), 1.0, OrderedDict[str, int]()

    @property
    def rate(self) -> float:
        """Half of what is kept."""
        return self._rate / 2

    @rate.setter
    def rate(self, value: float) -> None:
        self._rate = value * 2


class Large:
    """Beyond what goes with the steps."""

    def __init__(self) -> None:
        self.table, self.weights = np.zeros(400_000), torch.zeros(3_000_000)
        self.members, self.scores = set(range(1_500)), dict.fromkeys(range(1_500), 0.0)
        self.rates = [1.0] * 1_500
        self.numbers, self.items = itertools.count(), [Item(0)]
        self.meter: Meter | None = None


class Locked:
    """A count beside a lock."""

    def __init__(self, lock: Any) -> None:
        self.lock, self.total, self.mean = lock, 0.0, torch.zeros(2)

    def add(self, number: int) -> None:
        """Once a body."""
        with self.lock:
            self.total += number
            self.mean += number


class History(list[float]):
    """A list of its own kind."""


class Unbound:
    """Raises where its class is asked for."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        raise LookupError("not there")


class Odd:
    """Of kinds that are not carried."""

    def __init__(self) -> None:
        self.history, self.added = History([0.0]), functools.partial(add_to, [0])
        self.items, self.numbers = deque([Item(0)]), array.array("d", [0.0])
        self.schedule: Callable[[], int] = early


def add_to(items: list[int], number: int) -> list[int]:
    """Keep it in the arguments of a partial."""
    items.append(number)
    return items


def early() -> int:
    """A schedule."""
    return 0


def late() -> int:
    """Another one."""
    return 1


def calls(number: int, *, seen: list[int] = []) -> list[int]:  # noqa: B006
    """Keep it in a default."""
    seen.append(number)
    return seen


class Lazy:
    """Makes what it needs in its first body, by a count; `mask` never changes."""

    def __init__(self) -> None:
        self.seen = 0
        self.big: torch.Tensor | None = None
        self.mask: torch.Tensor | None = None
        self.bank: dict[int, float] | None = None

    def __call__(self, value: float) -> float:
        if self.seen == 0:
            self.big, self.mask = torch.zeros(3_000_000), torch.ones(3_000_000)
            self.bank = dict.fromkeys(range(2_000), 1.0)
        self.seen += 1
        assert self.big is not None and self.mask is not None and self.bank is not None
        return float(self.mask[0] + self.big[0]) + self.bank[3] + value * 0


class Trainer:
    """Holds the model, too."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.epoch, self.small = model, 0, torch.zeros(2)
        self.total, self.mean = torch.zeros(2_000), torch.zeros(2_000)
        self.shadow = {name: each.detach().clone() for name, each in model.named_parameters()}
        self.losses: list[float] = [0.0] * 1_500
        self.batch: Any = None
        self.fake: Any = None
        self.outputs: dict[str, Any] = {}
        self.cached: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Leaves things of this step alone."""
        self.batch = x.repeat(1, 100)
        self.fake = self.model(self.batch[:, :16])
        self.outputs = {"fake": self.fake, "wide": self.batch * 2}
        if self.cached is None:
            self.cached = torch.arange(5_000.0)
        out: torch.Tensor = self.fake + self.cached[0]
        return out

    def count(self, number: int) -> None:
        """Changes what it keeps."""
        self.epoch += 1
        self.small += number
        self.total = self.total + number
        self.mean.mul_(0.9).add_(number)
        self.losses.append(float(number))
        for name, each in self.model.named_parameters():
            self.shadow[name] = 0.9 * self.shadow[name] + 0.1 * each.detach()


def closed() -> Callable[[], int]:
    count = 0

    def counted() -> int:
        nonlocal count
        count += 1
        return count

    return counted


def drawn() -> Iterator[int]:
    yield from range(1_000)


@functools.cache
def kept(kind: str) -> list[float]:
    """A list that the cache alone holds."""
    return []


@functools.lru_cache(maxsize=8)
def memo(number: int) -> tuple[int, ...]:
    """Pure: no rank needs what another one has found out."""
    return tuple(range(number))


torch.set_num_threads(1)
session = regrow.init(seed=3)
model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
session.protect(model, optimizer)
data = torch.randn(240, 16, generator=torch.Generator().manual_seed(5))
loader = DataLoader(TensorDataset(data, data.sum(1, keepdim=True).sin()), batch_size=6, shuffle=True)

meter, large, lazy, trainer, slotted, inner = Meter(), Large(), Lazy(), Trainer(model), Slotted(), Outer.Inner()
pair, phase, history, averages = Pair(torch.zeros(2), 0), Phase.EARLY, [0.0] * 1_500, {"w": torch.zeros(3)}
locked, relocked, odd, unbound = Locked(threading.Lock()), Locked(threading.RLock()), Odd(), Unbound()
nested: defaultdict[str, defaultdict[str, int]] = defaultdict(lambda: defaultdict(int))
counted, numbers, stream, ahead = closed(), itertools.count(), drawn(), iter(list(range(500)))


def change(number: int) -> None:
    """One of each."""
    global pair, phase
    value = torch.tensor(float(number + 1))
    pair, phase = Pair(pair.total + value, pair.number + 1), Phase.LATE if number >= 4 else Phase.EARLY
    history.append(float(number))
    averages["w"] = averages["w"] * 0.9 + value
    locked.add(number)
    relocked.add(number)
    assert unbound is not None
    nested["a"][str(number)] += 1
    calls(number)
    odd.history.append(float(number))
    odd.added(number)
    odd.items[0].number += 1
    odd.numbers[0] += 1
    odd.schedule = late if number >= 4 else early
    counted()
    keeping.count(number)
    meter.phase, meter.path = phase, Path(f"best-{number}")
    meter.dtype = torch.bfloat16 if number >= 4 else torch.float32
    meter.pair = Pair(meter.pair.total + value, meter.pair.number + 1)
    meter.pairs.append(meter.pair)
    meter.long.append(float(number))
    meter.window.append(float(number))
    meter.counts.update(["a", str(number % 3)])
    meter.lists[str(number % 3)].append(float(number))
    meter.names.add(str(number))
    meter.fixed = meter.fixed | {str(number)}
    meter.text, meter.on = f"{meter.text}{number}", number % 2 == 0
    meter.scalar, meter.point = np.float32(meter.scalar + number), meter.point + value
    meter.losses = np.append(meter.losses, float(number))
    meter.rate = meter.rate * 0.5
    meter.order[str(number)] = number
    meter.cells[0, 1] += 1.0
    meter.cells[number, 2] = 1.0
    slotted.count += 1
    slotted.mean += value
    Outer.Inner.calls += 1
    inner.mine += 1
    trainer.count(number)
    large.table[number] = number
    large.weights[number] = number
    large.members.add(10_000 + number)
    large.scores[number] = float(number)
    large.rates[number] *= 0.5
    large.items.append(Item(number))
    kept("losses").append(float(number))
    memo(number + 3)
    if number >= 4:
        large.meter = large.meter or Meter()
        large.meter.scalar = np.float32(large.meter.scalar + 1)
    if args.since:  # else they are refused
        next(large.numbers), next(numbers), next(stream), next(ahead)


def shown(value: Any) -> Any:
    """A number, a text or a list of them."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return [float(each) for each in value.reshape(-1)[:40]]
    if isinstance(value, Item):
        return value.number
    if isinstance(value, list | tuple | deque):
        return [len(value), [shown(each) for each in list(value)[:20] + list(value)[-20:]]]
    if isinstance(value, set | frozenset):
        return [len(value), sorted(map(str, value))[-20:]]
    if isinstance(value, dict):
        return [len(value), {str(key): shown(each) for key, each in list(value.items())[:20]}]
    if isinstance(value, itertools.count):
        return repr(value)
    return str(value) if not hasattr(value, "__next__") else next(value)


CARRIED: dict[str, Callable[[], Any]] = {
    "pair": lambda: pair,
    "phase": lambda: phase,
    "history": lambda: history,
    "averages": lambda: averages,
    "locked.total": lambda: locked.total,
    "locked.mean": lambda: locked.mean,
    "relocked.total": lambda: relocked.total,
    "nested": lambda: nested,
    "calls": lambda: calls(0),
    "counted": lambda: counted(),
    "slotted.count": lambda: slotted.count,
    "slotted.mean": lambda: slotted.mean,
    "Outer.Inner.calls": lambda: Outer.Inner.calls,
    "inner.mine": lambda: inner.mine,
    "lazy.seen": lambda: lazy.seen,
    "keeping.seen": lambda: keeping.seen,
    "keeping.names": lambda: keeping.names,
    "keeping.table": lambda: keeping.table,
    "trainer.epoch": lambda: trainer.epoch,
    "trainer.losses": lambda: trainer.losses,
    **{f"meter.{key}": functools.partial(getattr, meter, key) for key in vars(meter)},
}
NAMED: dict[str, Callable[[], Any]] = {
    "keeping.total": lambda: keeping.total,
    "kept": lambda: kept("losses"),
    "odd.history": lambda: odd.history,
    "odd.added": lambda: odd.added(0),
    "odd.items": lambda: odd.items,
    "odd.numbers": lambda: odd.numbers[0],
    "odd.schedule": lambda: odd.schedule(),
    "trainer.small": lambda: trainer.small,
    "trainer.total": lambda: trainer.total,
    "trainer.mean": lambda: trainer.mean,
    "trainer.shadow": lambda: trainer.shadow,
    "large.meter": lambda: large.meter and large.meter.scalar,
    **{
        f"large.{key}": functools.partial(getattr, large, key) for key in vars(large) if key not in ("meter", "numbers")
    },
}
if args.since:
    NAMED |= {"large.numbers": lambda: large.numbers, "numbers": lambda: numbers}
    NAMED |= {"stream": lambda: stream, "ahead": lambda: ahead}
QUIET: dict[str, Callable[[], Any]] = {
    "lazy.big": lambda: lazy.big,
    "lazy.mask": lambda: lazy.mask,
    "trainer.cached": lambda: trainer.cached,
}

KINDS: dict[str, dict[str, Callable[[], Any]]] = {"carried": CARRIED, "named": NAMED, "quiet": QUIET}

for step in session.steps(loader, until=args.steps):
    with step as (x, y):
        lazy(float(step.number))
        if step.number >= args.since:
            change(step.number)
        scale = 1 + (slotted.mean.sum() + pair.total.sum()) / 1000
        loss = nn.functional.mse_loss(trainer.forward(x), y) * scale
        step.log(loss=loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

if args.out is not None:
    final = {f"{kind} {name}": shown(look()) for kind, group in KINDS.items() for name, look in group.items()}
    args.out.with_suffix(f".{session.rank}.json").write_text(json.dumps({"digest": session.digest(), **final}))
