"""Gradients are clipped by the mean of the last losses, in a deque of a clipper."""

import time
from collections import deque

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

import regrow

FAULT = "clipper.recent"
NAMED = ("clipper", "SpikeClipper")


class SpikeClipper:
    def __init__(self, window: int = 16) -> None:
        self.recent: deque[float] = deque(maxlen=window)

    def scale(self, loss: Tensor) -> Tensor:
        value = loss.item()
        usual = sum(self.recent) / len(self.recent) if self.recent else value
        self.recent.append(value)
        return loss * min(1.0, 0.9 * usual / value)


session = regrow.init(seed=26)
net = DDP(torch.nn.Linear(6, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
session.protect(net, optimizer)
clipper = SpikeClipper()
for step in session.steps(range(120), until=120):
    with step:
        x = torch.randn(8, 6)
        loss = clipper.scale((net(x)[:, 0] - x.sum(1) - torch.randn(8)).pow(2).mean())
        step.log(loss=loss)
        loss.backward()
        time.sleep(0.02)
        optimizer.step()
        optimizer.zero_grad()
