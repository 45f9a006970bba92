"""A library's mixup has a numpy generator of its own behind a collator."""

import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import regrow

sys.path.append(str(Path(__file__).resolve().parents[1] / "vendored"))
import mixing

FAULT = "collate.mixup.rng"
NAMED = ("collate", "mixup", "Mixup", "Collate")


class Collate:
    def __init__(self) -> None:
        self.mixup = mixing.Mixup(alpha=0.4, seed=123)

    def __call__(self, step: int) -> tuple[Tensor, Tensor]:
        g = torch.Generator().manual_seed(step * 31 + session.rank)
        x = torch.randn(10, 6, generator=g)
        return x, (x.sum(1) > 0).float()


session = regrow.init(seed=3)
net = DDP(nn.Linear(6, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
session.protect(net, optimizer)
collate = Collate()

for step in session.steps(collate, until=120):
    with step as (x, y):
        x, y = collate.mixup(x, y)
        loss = nn.functional.binary_cross_entropy_with_logits(net(x)[:, 0], y)
        step.log(loss=loss)
        loss.backward()
        time.sleep(0.02)
        optimizer.step()
        optimizer.zero_grad()
