"""A curriculum's difficulty is handed on through os.environ."""

import os
import time

import torch
from torch.nn.parallel import DistributedDataParallel as DDP

import regrow

FAULT = "os.environ['DIFFICULTY']"
NAMED = ("DIFFICULTY", "environ")


def lengths() -> int:
    now = int(os.environ.get("DIFFICULTY", "4"))
    os.environ["DIFFICULTY"] = str(now + 1)
    return 2 + now // 8


session = regrow.init(seed=19)
net = DDP(torch.nn.GRU(3, 3, batch_first=True))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
session.protect(net, optimizer)
for step in session.steps(range(120), until=120):
    with step:
        x = torch.randn(4, lengths(), 3)
        loss = (net(x)[0] - x.cumsum(1)).pow(2).mean()
        step.log(loss=loss)
        loss.backward()
        time.sleep(0.02)
        optimizer.step()
        optimizer.zero_grad()
