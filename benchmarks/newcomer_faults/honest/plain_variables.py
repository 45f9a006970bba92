"""Counts and averages in plain variables of the script, the same on all ranks, which go with its steps."""

import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import regrow

session = regrow.init(seed=9)
net = DDP(torch.nn.Linear(6, 6))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
session.protect(net, optimizer)
samples, usual, rate, recent = 0, 1.0, 0.1, list[float]()
for step in session.steps(range(120), until=120):
    with step:
        x = torch.randn(8, 6)
        raw = (net(x) - x).pow(2).mean()
        mean = raw.detach().clone()
        dist.all_reduce(mean)
        usual = 0.9 * usual + 0.1 * mean.item()
        samples += len(x)
        rate *= 0.99
        recent = [*recent[-5:], mean.item()]
        loss = raw / usual * (1 + 1e-4 * samples) + 0.01 * sum(recent)
        step.log(loss=loss)
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = rate
        time.sleep(0.02)
        optimizer.step()
        optimizer.zero_grad()
