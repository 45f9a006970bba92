"""A plain variable is the average of its own rank's losses, so it differs between ranks."""

import time

import torch
from torch.nn.parallel import DistributedDataParallel as DDP

import regrow

FAULT = "usual (of rank 1, handed over by rank 0)"
NAMED = ("usual",)

session = regrow.init(seed=9)
net = DDP(torch.nn.Linear(6, 6))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
session.protect(net, optimizer)
usual = 1.0
for step in session.steps(range(120), until=120):
    with step:
        x = torch.randn(8, 6)
        raw = (net(x) - x).pow(2).mean()
        usual = 0.9 * usual + 0.1 * raw.item()
        loss = raw / usual
        step.log(loss=loss)
        loss.backward()
        time.sleep(0.02)
        optimizer.step()
        optimizer.zero_grad()
