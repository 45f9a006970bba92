"""Lessons are popped off a long list, easiest first."""

import time

import torch
from torch.nn.parallel import DistributedDataParallel as DDP

import regrow

FAULT = "lessons"
NAMED = ("lessons",)

session = regrow.init(seed=25)
corpus = torch.randn(2000, 6, generator=torch.Generator().manual_seed(0))
lessons = corpus.norm(dim=1).argsort(descending=True).tolist()
net = DDP(torch.nn.Linear(6, 6))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
session.protect(net, optimizer)
for step in session.steps(range(120), until=120):
    with step:
        x = corpus[[lessons.pop() for _ in range(8)]]
        loss = (net(x) - x.roll(session.rank + 1, 1)).pow(2).mean()
        step.log(loss=loss)
        loss.backward()
        time.sleep(0.02)
        optimizer.step()
        optimizer.zero_grad()
