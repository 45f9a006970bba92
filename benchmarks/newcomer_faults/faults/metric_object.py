"""torchmetrics keeps a mean over all steps, and the loss is divided by it."""

import time

import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from torchmetrics import MeanMetric

import regrow

FAULT = "usual (torchmetrics.MeanMetric)"
NAMED = ("usual", "MeanMetric")

session = regrow.init(seed=46)
usual = MeanMetric(sync_on_compute=False)
net = DDP(torch.nn.Linear(6, 6))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
session.protect(net, optimizer)
for step in session.steps(range(300), until=300):
    with step:
        x = torch.randn(8, 6)
        raw = (net(x) - x).pow(2).mean()
        usual.update(raw.detach())
        loss = raw / (usual.compute() + 0.1)
        step.log(loss=loss)
        loss.backward()
        time.sleep(0.05)
        optimizer.step()
        optimizer.zero_grad()
