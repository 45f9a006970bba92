"""Autocast is entered for good at a step."""

import time

import torch
from torch.nn.parallel import DistributedDataParallel as DDP

import regrow

FAULT = "torch.autocast, entered at step 10"
NAMED = ("autocast",)

session = regrow.init(seed=32)
net = DDP(torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8)))
optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
session.protect(net, optimizer)
low = torch.autocast("cpu", dtype=torch.bfloat16)
for step in session.steps(range(150), until=150):
    if step.number == 10:
        low.__enter__()
    with step:
        x = torch.randn(16, 8)
        loss = (net(x).float() - x.sin()).pow(2).mean()
        step.log(loss=loss)
        loss.backward()
        time.sleep(0.03)
        optimizer.step()
        optimizer.zero_grad()
