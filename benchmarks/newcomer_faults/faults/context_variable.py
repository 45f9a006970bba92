"""A temperature is in a context variable, and every body lowers it."""

import time
from contextvars import ContextVar

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

import regrow

FAULT = "TEMPERATURE"
NAMED = ("TEMPERATURE", "temperature")
TEMPERATURE: ContextVar[float] = ContextVar("temperature", default=2.0)


def soft(logits: Tensor) -> Tensor:
    return (logits / TEMPERATURE.get()).log_softmax(1)


session = regrow.init(seed=14)
net = DDP(torch.nn.Linear(6, 4))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
session.protect(net, optimizer)
for step in session.steps(range(120), until=120):
    with step:
        x, y = torch.randn(16, 6), torch.randint(0, 4, (16,))
        TEMPERATURE.set(max(0.5, TEMPERATURE.get() * 0.995))
        loss = torch.nn.functional.nll_loss(soft(net(x)), y)
        step.log(loss=loss)
        loss.backward()
        time.sleep(0.02)
        optimizer.step()
        optimizer.zero_grad()
