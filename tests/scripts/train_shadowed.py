"""A small training one part of which a newcomer would compute in another way: each `--fault` is one such part."""

import argparse
import functools
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import regrow
from regrow.core.ids import StepNo
from regrow.core.messages.replacements import ProveReplacement
from regrow.train.worker.shadowing.shadow_proofs import ShadowProofs

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100_000)
parser.add_argument("--fault", default="")
parser.add_argument("--out", type=Path, default=None)
parser.add_argument("--made", choices=["", "waits", "raises"], default="", help="what a newcomer made for a proof does")
parser.add_argument("--pace", type=float, default=0.005, help="seconds that a step lasts more")
parser.add_argument(
    "--hold", default="", choices=["", "offered", "shadow", "backward"], help="wait there until there is `go`"
)
args = parser.parse_args()

if args.made and '"role":"prover"' in os.environ["REGROW_WORKER_ENV"]:
    Path("building").touch()
    while args.made == "waits":
        time.sleep(0.05)
    raise OSError("the port is taken")

session = regrow.init(seed=3)
offered: list[int] = []
proving: list[ShadowProofs] = []
if args.hold == "backward":
    await_order = ShadowProofs.await_order

    def awaiting(proofs: ShadowProofs) -> ProveReplacement | None:
        proving.append(proofs)
        return await_order(proofs)

    ShadowProofs.await_order = awaiting  # type: ignore[assignment, method-assign]
if args.hold == "offered":
    offer = ShadowProofs.offer

    def offering(proofs: ShadowProofs, step: StepNo) -> None:
        offer(proofs, step)
        offered.append(step)

    ShadowProofs.offer = offering  # type: ignore[assignment, method-assign]


def held(step: regrow.Step) -> None:
    """Wait in the middle of a proof, as the rank whose state is read or as its shadow."""
    if not step.rehearsal:
        Path(f"{os.getpid()}.new").write_text(str(os.getpid()))
        os.replace(f"{os.getpid()}.new", f"{session.rank}.pid")  # whole at each moment
    if step.proof if args.hold == "shadow" else step.number in offered:
        wait_for_go()


def wait_for_go() -> None:
    Path("held").touch()
    while not Path("go").exists():
        time.sleep(0.01)


def held_in_backward(gradient: torch.Tensor) -> None:
    """The last layer has its gradients, and they are not reduced yet: go on when this worker is needed."""
    if step.proof and not Path("go").exists():
        wait_for_go()
        until = time.monotonic() + 60
        while not proving[-1].over and time.monotonic() < until:
            time.sleep(0.01)


torch.set_num_threads(1)
early_rank = int(dict(os.environ)["RANK"]) if args.fault == "rank" else 0


class Augment:
    """Change of a body's batch, with state of its own."""

    total = 0.0

    def __init__(self) -> None:
        self.calls = 0
        self.mean = torch.zeros(16)
        self.model: nn.Module | None = None
        self.began = time.monotonic()
        self.seen: dict[int, float] = {}
        self.numbers = np.random.default_rng()
        self.python = random.Random()
        self.torch = torch.Generator()
        self.torch.seed()
        self.gain = float(os.environ.get("GAIN", "1.0"))
        self.text = Path("scale.txt").read_text() if Path("scale.txt").exists() else "1.0"

    def counter(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * (1 + 1e-3 * self.calls)

    def statistic(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return x - self.mean

    def number(self, x: torch.Tensor) -> torch.Tensor:
        Augment.total += float(x.abs().mean())
        return x / (1 + 1e-3 * Augment.total)

    def clock(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1 + 1e-3 * (time.monotonic() - self.began))

    def cache(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.setdefault(len(self.seen) % 7, float(x[0, 0]))
        return x * (1 + 1e-3 * len(self.seen))

    def generator(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1e-3 * float(self.numbers.standard_normal())

    def python_generator(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1e-3 * self.python.random()

    def torch_generator(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1e-3 * torch.rand(x.shape, generator=self.torch)

    def seeded(self, x: torch.Tensor) -> torch.Tensor:
        self.torch.manual_seed(1009 * (at := step.number) + session.rank)
        self.python.seed(at)
        return x + 1e-3 * torch.rand(x.shape, generator=self.torch) * self.python.random()

    def environment(self, x: torch.Tensor) -> torch.Tensor:
        return x * float(os.environ.get("GAIN", "1.0"))

    def file(self, x: torch.Tensor) -> torch.Tensor:
        return x * float(self.text)

    def rank(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1 + early_rank)


@functools.lru_cache
def made_once(kind: str) -> float:
    return random.SystemRandom().random()


def closure() -> Callable[[torch.Tensor], torch.Tensor]:
    count = 0

    def scaled(x: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        return x * (1 + 1e-3 * count)

    return scaled


class Noisy(nn.Module):
    """A module that counts its own calls in a plain attribute, and is right in every other way."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if args.fault == "module":
            self.forwards.append(1)
        return x * (1 + 1e-3 * len(self.forwards))


augment = Augment()
if args.fault == "file":
    Path("scale.txt").write_text(str(float(augment.text) + 0.001))
if args.fault == "environment":
    os.environ["GAIN"] = str(1 + 1e-6 * os.getpid())
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(16, 32), Noisy(), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1))
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
session.protect(model, optimizer)
augment.model = model  # arrays of what holds the model are not followed
if args.hold == "backward":
    next(net.parameters()).register_hook(held_in_backward)  # type: ignore[no-untyped-call]
data = torch.randn(240, 16, generator=torch.Generator().manual_seed(5))
dataset = torch.utils.data.TensorDataset(data, data.sum(1, keepdim=True).sin())
loader = torch.utils.data.DataLoader(dataset, batch_size=6, shuffle=True)
scaled, rate = closure(), 0
HOW = {
    "closure": scaled,
    "memoized": lambda x: x * (1 + 1e-3 * made_once("x")),
    **{name: getattr(augment, name) for name, what in vars(Augment).items() if callable(what)},
}

for step in session.steps(loader, until=args.steps):
    with step as (x, y):
        began = time.monotonic()
        time.sleep(args.pace)
        if args.hold:
            held(step)
        flag = torch.tensor(float(Path("enough").exists()))
        torch.distributed.all_reduce(flag)
        stop = flag.item() > 0
        if args.fault in HOW:
            x = HOW[args.fault](x)
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        if args.fault == "rate":
            rate += 0 if step.rehearsal else 1
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 / (1 + len(augment.seen))
            augment.seen[step.number] = 0.0
        if args.fault == "clip":
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        step.log(loss=loss, seconds=time.monotonic() - began)
        optimizer.step()
        optimizer.zero_grad()
    if step.proof:
        Path("behind").touch()
    if stop and not step.rehearsal:
        break
