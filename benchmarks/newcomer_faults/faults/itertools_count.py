"""Masks are seeded by itertools.count in a class that makes them."""

import itertools
import time

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

import regrow

FAULT = "masks.ids"
NAMED = ("masks", "Masks", "ids")


class Masks:
    def __init__(self, rate: float) -> None:
        self.rate, self.ids = rate, itertools.count(1)

    def __call__(self, x: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(next(self.ids))
        return x * (torch.rand(x.shape, generator=generator) > self.rate)


def main() -> None:
    session = regrow.init(seed=16)
    masks = Masks(0.3)
    net = DDP(torch.nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    session.protect(net, optimizer)
    for step in session.steps(range(120), until=120):
        with step:
            x = torch.randn(8, 8)
            loss = (net(masks(x)) - x).pow(2).mean()
            step.log(loss=loss)
            loss.backward()
            time.sleep(0.02)
            optimizer.step()
            optimizer.zero_grad()


main()
