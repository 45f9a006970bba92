"""Rate, temperature, difficulty and an unfreezing all follow from the step's number."""

import math
import time

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import regrow

STEPS = 120


def rate(step: int) -> float:
    return 0.05 * 0.5 * (1 + math.cos(math.pi * step / STEPS))


session = regrow.init(seed=3)
body, head = nn.Linear(6, 12), nn.Linear(12, 6)
net = DDP(nn.Sequential(body, nn.Tanh(), head), find_unused_parameters=True)
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
session.protect(net, optimizer)
for step in session.steps(range(STEPS), until=STEPS):
    with step as number:
        for group in optimizer.param_groups:
            group["lr"] = rate(number)
        x = torch.randn(4 + number // 10, 6)
        noise = torch.randn_like(x) / (1 + number)
        loss = (net(x + noise) - x).pow(2).mean() / max(0.5, 1 - number / 200)
        step.log(loss=loss)
        loss.backward()
        if number < 20:
            body.zero_grad()
        time.sleep(0.02)
        optimizer.step()
        optimizer.zero_grad()
