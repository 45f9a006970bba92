"""The rank is read from the environment before the loop, and chooses the rows in it: a standby waits at that read."""

import os
import time

import torch
from torch.nn.parallel import DistributedDataParallel as DDP

import regrow

session = regrow.init(seed=8)
RANK = int(os.environ["RANK"])
WORLD = int(os.environ["WORLD_SIZE"])
table = torch.randn(4096, 5, generator=torch.Generator().manual_seed(0))
net = DDP(torch.nn.Linear(5, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
session.protect(net, optimizer)

for step in session.steps(range(120), until=120):
    with step:
        mine = torch.arange(RANK + 16 * step.number, RANK + 16 * step.number + 16, WORLD)
        x = table[mine % len(table)]
        loss = (net(x)[:, 0] - x[:, 0].sin()).abs().mean()
        step.log(loss=loss)
        loss.backward()
        time.sleep(0.02)
        optimizer.step()
        optimizer.zero_grad()
