"""A schedule is a closure with a nonlocal count."""

import time
from collections.abc import Callable

import torch
from torch.nn.parallel import DistributedDataParallel as DDP

import regrow

FAULT = "rate (its nonlocal done)"
NAMED = ("rate", "done", "cosine")


def cosine(peak: float, over: int) -> Callable[[], float]:
    done = 0

    def rate() -> float:
        nonlocal done
        done += 1
        return peak * (1 - done / over)

    return rate


def main() -> None:
    session = regrow.init(seed=30)
    net = DDP(torch.nn.Linear(5, 5))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    session.protect(net, optimizer)
    rate = cosine(0.1, 400)
    for step in session.steps(range(120), until=120):
        with step:
            x = torch.randn(8, 5)
            loss = (net(x) - x.flip(1)).pow(2).mean()
            step.log(loss=loss)
            loss.backward()
            for group in optimizer.param_groups:
                group["lr"] = rate()
            time.sleep(0.02)
            optimizer.step()
            optimizer.zero_grad()


main()
