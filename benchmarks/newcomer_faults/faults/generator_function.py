"""Batches come from a generator on which the body calls next()."""

import time
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

import regrow

FAULT = "stream"
NAMED = ("stream", "windows")


def windows(rank: int) -> Iterator[Tensor]:
    text = torch.randn(50_000, generator=torch.Generator().manual_seed(rank))
    while True:
        yield from text.split(64)


def main() -> None:
    session = regrow.init(seed=38)
    net = DDP(torch.nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    session.protect(net, optimizer)
    stream = windows(session.rank)
    for step in session.steps(range(120), until=120):
        with step:
            x = next(stream)[:64].view(8, 8)
            loss = (net(x) - x.cumsum(1)).pow(2).mean()
            step.log(loss=loss)
            loss.backward()
            time.sleep(0.02)
            optimizer.step()
            optimizer.zero_grad()


main()
