"""The learning rate of a hand-made update is a field of a configuration, multiplied in each body."""

import time
from dataclasses import dataclass

import torch
from torch.nn.parallel import DistributedDataParallel as DDP

import regrow

FAULT = "config.lr"
NAMED = ("config", "Config")


@dataclass
class Config:
    lr: float = 0.1
    decay: float = 0.99
    steps: int = 120


def train(config: Config) -> None:
    session = regrow.init(seed=24)
    net = DDP(torch.nn.Linear(6, 1))
    session.protect(net)
    for step in session.steps(range(config.steps), until=config.steps):
        with step:
            x = torch.randn(16, 6)
            loss = (net(x)[:, 0] - x.sum(1)).pow(2).mean()
            step.log(loss=loss)
            net.zero_grad()
            loss.backward()
            time.sleep(0.02)
            step.update()
            with torch.no_grad():
                for p in net.parameters():
                    if p.grad is not None:
                        p -= config.lr * p.grad
            config.lr *= config.decay


train(Config())
