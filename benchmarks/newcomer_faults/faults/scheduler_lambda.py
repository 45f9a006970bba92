"""A protected LambdaLR whose lambda ignores its argument and uses its own count."""

import itertools
import time

import torch
from torch.nn.parallel import DistributedDataParallel as DDP

import regrow

FAULT = "ticks"
NAMED = ("ticks", "lambda", "count")

session = regrow.init(seed=42)
net = DDP(torch.nn.Linear(6, 6))
optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
ticks = itertools.count()
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 0.99 ** next(ticks))
session.protect(net, optimizer, scheduler)
for step in session.steps(range(120), until=120):
    with step:
        x = torch.randn(8, 6)
        loss = (net(x) - x.roll(1, 1)).pow(2).mean()
        step.log(loss=loss)
        loss.backward()
        time.sleep(0.02)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
