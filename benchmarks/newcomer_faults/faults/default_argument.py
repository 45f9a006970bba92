"""A loss remembers its own scale in the dictionary that is its default argument."""

import time

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

import regrow

FAULT = "balanced (its default argument memo)"
NAMED = ("balanced", "memo")


def balanced(name: str, value: Tensor, memo: dict[str, float] = {}) -> Tensor:  # noqa: B006
    memo[name] = 0.9 * memo.get(name, 1.0) + 0.1 * float(value)
    return value / memo[name]


session = regrow.init(seed=15)
net = DDP(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
session.protect(net, optimizer)
for step in session.steps(range(120), until=120):
    with step:
        x = torch.randn(8, 4)
        out = net(x)
        loss = balanced("a", (out[:, 0] - 1).pow(2).mean()) + balanced("b", (out[:, 1] - x[:, 0]).abs().mean())
        step.log(loss=loss)
        loss.backward()
        time.sleep(0.02)
        optimizer.step()
        optimizer.zero_grad()
