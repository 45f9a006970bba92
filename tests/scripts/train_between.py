"""A training whose script changes protected state where the engine did not use to look. `--habits` says where."""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import regrow

parser = argparse.ArgumentParser()
parser.add_argument("--habits", default="")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--out", type=Path)
args = parser.parse_args()
habits = set(args.habits.split(","))

torch.set_num_threads(1)
session = regrow.init(seed=3)
net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
model = DistributedDataParallel(net)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
key = nn.Linear(8, 16)
key.requires_grad_(False)
ema = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]


class Bank:
    """A queue of more than a mebibyte in a tensor, a small one in an array."""

    def __init__(self) -> None:
        self.large, self.small, self.at = torch.zeros(300_000), np.zeros(12), 0

    def push(self, value: float) -> None:
        self.large[self.at % 7] += value
        self.small[self.at % 12] = value + self.small.sum()
        self.at += 1

    def state_dict(self) -> dict[str, object]:
        return {"large": self.large, "small": self.small, "at": self.at}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.large, self.small, self.at = state["large"], state["small"], int(str(state["at"]))  # type: ignore[assignment]


bank = Bank()
noise = torch.Generator()
session.protect(model, optimizer, scheduler, noise, key=key, ema=ema, bank=bank)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(6, 8, generator=torch.Generator().manual_seed(1000 * step + session.rank))
    return inputs, inputs.sum(1, keepdim=True).sin()


def exchange() -> list[torch.Tensor]:
    """Put the averaged weights into the model; returns its own."""
    own = [p.detach().clone() for p in net.parameters()]
    for mine, averaged in zip(net.parameters(), ema.module.parameters(), strict=True):
        mine.data.copy_(averaged.data)
    return own


def score() -> None:
    own = exchange()
    net.eval()
    total = torch.zeros(1)
    for part in range(3):
        x, y = batch(10_000 + part)
        total += nn.functional.mse_loss(net(x), y).detach()
        dist.all_reduce(total)
    net.train()
    for mine, before in zip(net.parameters(), own, strict=True):
        mine.data.copy_(before)
    if "persist" in habits:
        bank.push(float(total))


def after(step: regrow.Step) -> None:
    if "guarded" in habits and not step.committed:
        return
    if "between" in habits:
        scheduler.step()
        ema.update_parameters(net)
        bank.push(float(step.number))


evaluate = regrow.restartable(score) if "restartable" in habits else score

for step in session.steps(batch, until=args.steps):
    with step as (x, y):
        if "early" in habits:
            for mine, theirs in zip(key.parameters(), net[0].parameters(), strict=True):
                mine.data.mul_(0.9).add_(theirs.detach().data, alpha=0.1)
            ema.update_parameters(net)
            bank.push(float(key.weight.sum()))
        drawn = torch.randn(x.shape, generator=noise)
        loss = nn.functional.mse_loss(model(x + 0.1 * drawn), y) + key(x).mean() * float(bank.small.mean())
        step.log(loss=loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    after(step)
    if "restartable" in habits and step.number % 3 == 2:
        evaluate()
        if "between" in habits and ("guarded" not in habits or step.committed):
            bank.push(0.5)
        evaluate()

if args.out is not None:
    report = {"digest": session.digest(), "rank": session.rank, "last": [scheduler.last_epoch, bank.at]}
    args.out.with_suffix(f".{session.rank}.json").write_text(json.dumps(report))
