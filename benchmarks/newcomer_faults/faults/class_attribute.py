"""Layers share a count in a class attribute of their noise schedule."""

import time

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import regrow

FAULT = "Schedule.ticks"
NAMED = ("Schedule", "ticks")


class Schedule:
    ticks = 0

    @classmethod
    def sigma(cls) -> float:
        cls.ticks += 1
        return 1.0 / (1.0 + 0.02 * cls.ticks)


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + Schedule.sigma() * torch.randn_like(x)


def main() -> None:
    session = regrow.init(seed=13)
    net = DDP(nn.Sequential(Noisy(), nn.ReLU(), Noisy()))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02)
    session.protect(net, optimizer)
    for step in session.steps(range(120), until=120):
        with step:
            x = torch.randn(8, 6)
            loss = (net(x) - x).pow(2).mean()
            step.log(loss=loss)
            loss.backward()
            time.sleep(0.02)
            optimizer.step()
            optimizer.zero_grad()


main()
