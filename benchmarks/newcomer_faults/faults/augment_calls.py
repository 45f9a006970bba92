"""A transform counts its calls, and its jitter grows with the count."""

import time

import torch
import torch.nn as nn
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

import regrow

FAULT = "augment.calls"
NAMED = ("augment", "Jitter")


class Jitter:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * (1 + 0.01 * self.calls)


session = regrow.init(seed=1)
net = DDP(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
session.protect(net, optimizer)
augment = Jitter()


def batch(step: int) -> Tensor:
    torch.manual_seed(step * 7 + session.rank)
    return torch.randn(16, 8)


for step in session.steps(batch, until=120):
    with step as x:
        x = augment(x)
        time.sleep(0.03)
        loss = (net(x).squeeze(1) - x.sum(1)).pow(2).mean()
        step.log(loss=loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
