"""A function of a library's module counts its calls in a global of that module."""

import sys
import time
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel as DDP

import regrow

sys.path.append(str(Path(__file__).resolve().parents[1] / "vendored"))
from mixing import decayed_noise

FAULT = "mixing._calls"
NAMED = ("_calls", "mixing", "decayed_noise")

session = regrow.init(seed=1)
net = DDP(torch.nn.Linear(7, 3))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
session.protect(net, optimizer)
for step in session.steps(range(120), until=120):
    with step:
        x = torch.randn(9, 7)
        loss = (net(decayed_noise(x)) - x[:, :3]).pow(2).mean()
        step.log(loss=loss)
        loss.backward()
        time.sleep(0.02)
        optimizer.step()
        optimizer.zero_grad()
