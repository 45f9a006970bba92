"""The default dtype is float64 from a step on, and noise is drawn in it."""

import time

import torch
from torch.nn.parallel import DistributedDataParallel as DDP

import regrow

FAULT = "torch.set_default_dtype at step 15"
NAMED = ("dtype",)

session = regrow.init(seed=31)
net = DDP(torch.nn.Linear(6, 6))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
session.protect(net, optimizer)
for step in session.steps(range(150), until=150):
    if step.number == 15:
        torch.set_default_dtype(torch.float64)
    with step:
        x = torch.randn(8, 6)
        loss = (net(x.float()) - (x + 0.1 * torch.randn(8, 6)).float()).pow(2).mean()
        step.log(loss=loss)
        loss.backward()
        time.sleep(0.03)
        optimizer.step()
        optimizer.zero_grad()
