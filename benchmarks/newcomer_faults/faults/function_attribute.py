"""A loss function counts in an attribute of its own and adds a penalty that grows."""

import time

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

import regrow

FAULT = "criterion.calls"
NAMED = ("criterion", "calls")


def criterion(out: Tensor, x: Tensor) -> Tensor:
    criterion.calls = getattr(criterion, "calls", 0) + 1
    return (out - x).pow(2).mean() + 1e-3 * criterion.calls * out.abs().mean()


session = regrow.init(seed=41)
net = DDP(torch.nn.Linear(6, 6))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
session.protect(net, optimizer)
for step in session.steps(range(120), until=120):
    with step:
        x = torch.randn(8, 6)
        loss = criterion(net(x), x)
        step.log(loss=loss)
        loss.backward()
        time.sleep(0.02)
        optimizer.step()
        optimizer.zero_grad()
