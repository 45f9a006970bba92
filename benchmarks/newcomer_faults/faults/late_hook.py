"""A forward hook that shrinks activations is registered at a step, once."""

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import regrow

FAULT = "net.module[1] (a forward hook from step 10 on)"
NAMED = ("hook", "shrink")


def shrink(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    return output * 0.8


def main() -> None:
    session = regrow.init(seed=23)
    net = DDP(nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    session.protect(net, optimizer)
    for step in session.steps(range(150), until=150):
        if step.number == 10:
            net.module[1].register_forward_hook(shrink)
        with step:
            x = torch.randn(16, 6)
            loss = (net(x)[:, 0] - x.norm(dim=1)).pow(2).mean()
            step.log(loss=loss)
            loss.backward()
            time.sleep(0.03)
            optimizer.step()
            optimizer.zero_grad()


main()
