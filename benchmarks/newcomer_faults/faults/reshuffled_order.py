"""An order of the samples is shuffled anew at each epoch's begin, and kept until the next."""

import time

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

import regrow

FAULT = "pile.order"
NAMED = ("pile", "Pile", "order")


class Pile:
    def __init__(self, size: int) -> None:
        self.x = np.random.default_rng(0).normal(size=(size, 6)).astype("float32")
        self.order = np.arange(size)

    def batch(self, step: int, size: int) -> torch.Tensor:
        at = step * size % len(self.order)
        if at == 0:
            np.random.default_rng().shuffle(self.order)
        return torch.from_numpy(self.x[self.order[at : at + size]])


session = regrow.init(seed=44)
pile = Pile(512)
net = DDP(torch.nn.Linear(6, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
session.protect(net, optimizer)
for step in session.steps(range(130), until=130):
    with step:
        x = pile.batch(step.number, 8)
        loss = (net(x)[:, 0] - x.prod(1)).pow(2).mean()
        step.log(loss=loss)
        loss.backward()
        time.sleep(0.02)
        optimizer.step()
        optimizer.zero_grad()
