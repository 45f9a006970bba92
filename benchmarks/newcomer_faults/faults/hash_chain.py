"""Each step's dropout is seeded by a running hash of the losses so far."""

import hashlib
import time

import torch
from torch.nn.parallel import DistributedDataParallel as DDP

import regrow

FAULT = "chain (hashlib.sha256)"
NAMED = ("chain",)

session = regrow.init(seed=20)
chain = hashlib.sha256(b"run 7")
net = DDP(torch.nn.Linear(6, 6))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
session.protect(net, optimizer)
for step in session.steps(range(120), until=120):
    with step:
        torch.manual_seed(int(chain.hexdigest()[:8], 16))
        x = torch.randn(8, 6)
        loss = (net(torch.nn.functional.dropout(x, 0.2)) - x).pow(2).mean()
        step.log(loss=loss)
        chain.update(f"{loss.item():.6f}".encode())
        loss.backward()
        time.sleep(0.02)
        optimizer.step()
        optimizer.zero_grad()
