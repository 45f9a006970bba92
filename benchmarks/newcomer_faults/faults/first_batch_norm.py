"""A scaler fits itself to the first batch that it sees, as many preprocessing classes do."""

import time

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import regrow

FAULT = "scaler.mean"
NAMED = ("scaler", "LazyScaler")
KILL = 0


class LazyScaler:
    mean: Tensor | None = None
    std: Tensor | None = None

    def transform(self, x: Tensor) -> Tensor:
        if self.mean is None or self.std is None:
            self.mean, self.std = x.mean(0), x.std(0)
        return (x - self.mean) / self.std


session = regrow.init(seed=11)
scaler = LazyScaler()
net = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)))
optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
session.protect(net, optimizer)


def rows(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + session.rank)
    return torch.randn(8, 4, generator=generator) + 0.05 * step


for step in session.steps(rows, until=100):
    with step as x:
        optimizer.zero_grad()
        out = net(scaler.transform(x))
        loss = nn.functional.smooth_l1_loss(out[:, 0], x[:, 0])
        step.log(loss=loss)
        loss.backward()
        time.sleep(0.025)
        optimizer.step()
