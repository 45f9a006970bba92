"""The warm-up of the loss's second term depends on the seconds since the process began."""

import time

import torch
from torch.nn.parallel import DistributedDataParallel as DDP

import regrow

FAULT = "STARTED (time.monotonic)"
NAMED = ("STARTED", "time.monotonic", "clock")
STARTED = time.monotonic()


def beta() -> float:
    return min(1.0, (time.monotonic() - STARTED) / 30.0)


session = regrow.init(seed=2)
encoder = torch.nn.Linear(10, 6)
vae = DDP(torch.nn.Sequential(encoder, torch.nn.Linear(6, 10)))
optimizer = torch.optim.Adam(vae.parameters(), lr=1e-3)
session.protect(vae, optimizer)

for step in session.steps(range(100), until=100):
    with step:
        x = torch.randn(16, 10)
        loss = (vae(x) - x).pow(2).mean() + beta() * encoder.weight.pow(2).sum()
        step.log(loss=loss)
        loss.backward()
        time.sleep(0.02)
        optimizer.step()
        optimizer.zero_grad()
