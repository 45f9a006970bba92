"""A fixed random projection is drawn by a generator that is seeded by the time of the start."""

import time

import torch
from torch.nn.parallel import DistributedDataParallel as DDP

import regrow

FAULT = "projection (seeded by time.time_ns())"
NAMED = ("projection", "time_ns")


def main() -> None:
    session = regrow.init(seed=29)
    projection = torch.randn(32, 6, generator=torch.Generator().manual_seed(time.time_ns() % 2**31))
    net = DDP(torch.nn.Linear(6, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02)
    session.protect(net, optimizer)
    for step in session.steps(range(120), until=120):
        with step:
            x = torch.randn(8, 32)
            loss = (net(x @ projection)[:, 0] - x[:, 0]).pow(2).mean()
            step.log(loss=loss)
            loss.backward()
            time.sleep(0.02)
            optimizer.step()
            optimizer.zero_grad()


main()
