"""Collocation points come from one Sobol sequence, which advances with each draw."""

import time

import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.quasirandom import SobolEngine

import regrow

FAULT = "points (SobolEngine.num_generated)"
NAMED = ("points", "SobolEngine")

session = regrow.init(seed=6)
points = SobolEngine(2, scramble=True, seed=3)
net = DDP(torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
session.protect(net, optimizer)

for step in session.steps(range(120), until=120):
    with step:
        x = points.draw(16).requires_grad_()
        u = net(x)
        (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        loss = (slope[:, 0] - x[:, 1]).pow(2).mean() + u.pow(2).mean()
        step.log(loss=loss)
        loss.backward()
        time.sleep(0.02)
        optimizer.step()
        optimizer.zero_grad()
