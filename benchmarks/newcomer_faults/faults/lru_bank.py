"""A function under lru_cache returns a tensor for each class, and the body changes it."""

import time
from functools import cache

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

import regrow

FAULT = "centre (what its lru_cache holds)"
NAMED = ("centre",)


@cache
def centre(label: int) -> Tensor:
    return torch.full((6,), float(label))


session = regrow.init(seed=9)
net = DDP(torch.nn.Linear(3, 6))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
session.protect(net, optimizer)

for step in session.steps(range(120), until=120):
    with step:
        x, labels = torch.randn(12, 3), torch.randint(0, 4, (12,))
        features = net(x)
        loss = torch.stack(
            [(f - centre(k)).pow(2).mean() for f, k in zip(features, labels.tolist(), strict=True)]
        ).mean()
        step.log(loss=loss)
        loss.backward()
        for f, k in zip(features.detach(), labels.tolist(), strict=True):
            centre(k).lerp_(f, 0.05)
        time.sleep(0.02)
        optimizer.step()
        optimizer.zero_grad()
