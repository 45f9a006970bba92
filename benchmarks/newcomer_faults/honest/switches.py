"""A part of the model is switched by the step's number, and tables are built at their first use."""

import time

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import regrow


class Rotary(nn.Module):
    table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.linspace(0, 3, x.shape[1]).cos()
        return x * self.table


session = regrow.init(seed=11)
norm = nn.BatchNorm1d(12)
net = DDP(nn.Sequential(Rotary(), nn.Linear(6, 12), norm, nn.ReLU(), nn.Linear(12, 1)))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
session.protect(net, optimizer)
for step in session.steps(range(120), until=120):
    with step as n:
        norm.train(n < 30)
        x = torch.randn(8, 6)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=n % 2 == 1):
            loss = (net(x)[:, 0].float() - x[:, 0]).pow(2).mean()
        step.log(loss=loss)
        loss.backward()
        time.sleep(0.02)
        optimizer.step()
        optimizer.zero_grad()
