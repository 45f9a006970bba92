"""A random.Random is in a slot of an object in a list of transforms, as in many augmentation libraries."""

import random
import time

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

import regrow

FAULT = "transforms[1].random"
NAMED = ("transforms", "Erase", "random")


class Scale:
    __slots__ = ("by",)

    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.by


class Erase:
    __slots__ = ("random",)

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def __call__(self, x: Tensor) -> Tensor:
        x = x.clone()
        x[:, self.random.randrange(x.shape[1])] = 0
        return x


def main() -> None:
    session = regrow.init(seed=45)
    transforms = (Scale(0.5), Erase(4))
    net = DDP(torch.nn.Linear(6, 6))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    session.protect(net, optimizer)
    for step in session.steps(range(120), until=120):
        with step:
            x = y = torch.randn(8, 6)
            for transform in transforms:
                x = transform(x)
            loss = (net(x) - y).pow(2).mean()
            step.log(loss=loss)
            loss.backward()
            time.sleep(0.02)
            optimizer.step()
            optimizer.zero_grad()


main()
