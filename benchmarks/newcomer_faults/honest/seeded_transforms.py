"""Transforms own generators, which each call seeds anew by step and rank."""

import random
import time

import numpy as np
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

import regrow


class Augment:
    def __init__(self) -> None:
        self.generator = torch.Generator()

    def __call__(self, x: Tensor, step: int, rank: int) -> Tensor:
        self.generator.manual_seed(1009 * step + rank)
        flip = random.Random(step).random() < 0.5
        shift = int(np.random.default_rng([step, rank]).integers(3))
        x = x + 0.1 * torch.randn(x.shape, generator=self.generator)
        return (x.flip(1) if flip else x).roll(shift, 1)


session = regrow.init(seed=4)
augment = Augment()
net = DDP(torch.nn.Linear(6, 6))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
session.protect(net, optimizer)
for step in session.steps(range(1000), until=120):
    with step as n:
        x = torch.randn(8, 6)
        loss = (net(augment(x, step.number, session.rank)) - x).pow(2).mean()
        step.log(loss=loss)
        loss.backward()
        time.sleep(0.02)
        optimizer.step()
        optimizer.zero_grad()
