"""A thread makes batches in advance, from the first one on, and puts them into a queue."""

import queue
import threading
import time

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

import regrow

FAULT = "ready (a queue that a thread fills)"
NAMED = ("ready", "Queue", "queue", "produce")


def produce(into: "queue.Queue[Tensor]", seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    while True:
        into.put(torch.randn(8, 6, generator=generator))


session = regrow.init(seed=37)
ready: "queue.Queue[Tensor]" = queue.Queue(maxsize=4)
threading.Thread(target=produce, args=(ready, 1), daemon=True).start()
net = DDP(torch.nn.Linear(6, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
session.protect(net, optimizer)
for step in session.steps(range(120), until=120):
    with step:
        x = ready.get(timeout=30)
        loss = (net(x)[:, 0] - x.prod(1)).pow(2).mean()
        step.log(loss=loss)
        loss.backward()
        time.sleep(0.02)
        optimizer.step()
        optimizer.zero_grad()
