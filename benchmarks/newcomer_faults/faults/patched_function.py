"""After some steps the script replaces a library's function by another loss."""

import time

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import regrow

FAULT = "F.mse_loss (patched at step 12)"
NAMED = ("mse_loss",)

session = regrow.init(seed=22)
net = DDP(torch.nn.Linear(6, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
session.protect(net, optimizer)
for step in session.steps(range(150), until=150):
    with step:
        x = torch.randn(16, 6)
        if step.number == 12:
            F.mse_loss = F.l1_loss
        loss = F.mse_loss(net(x)[:, 0], x.sum(1) + 2)
        step.log(loss=loss)
        loss.backward()
        time.sleep(0.03)
        optimizer.step()
        optimizer.zero_grad()
