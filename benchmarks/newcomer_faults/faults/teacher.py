"""A teacher is updated every ten steps, and is not protected."""

import copy
import time

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import regrow

FAULT = "teacher"
NAMED = ("teacher",)

session = regrow.init(seed=33)
student = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))
teacher = copy.deepcopy(student).requires_grad_(False)
net = DDP(student)
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
session.protect(net, optimizer)
for step in session.steps(range(150), until=150):
    with step:
        x = torch.randn(16, 6)
        loss = (net(x) - teacher(x + 0.1 * torch.randn_like(x)) - x[:, :4]).pow(2).mean()
        step.log(loss=loss)
        loss.backward()
        time.sleep(0.02)
        optimizer.step()
        optimizer.zero_grad()
        if step.number % 10 == 9:
            teacher.load_state_dict(student.state_dict())
