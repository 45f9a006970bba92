"""Samples seen are counted in multiprocessing's shared memory, and temper the loss."""

import multiprocessing
import time

import torch
from torch.nn.parallel import DistributedDataParallel as DDP

import regrow

FAULT = "seen (multiprocessing.Value)"
NAMED = ("seen",)

session = regrow.init(seed=47)
seen = multiprocessing.Value("q", 0)
net = DDP(torch.nn.Linear(6, 6))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
session.protect(net, optimizer)
for step in session.steps(range(120), until=120):
    with step:
        x = torch.randn(8, 6)
        with seen.get_lock():
            seen.value += len(x)
        loss = (net(x) - x).pow(2).mean() / (1 + 1e-3 * seen.value)
        step.log(loss=loss)
        loss.backward()
        time.sleep(0.02)
        optimizer.step()
        optimizer.zero_grad()
