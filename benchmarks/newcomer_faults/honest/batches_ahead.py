"""A thread pool makes the next step's batch in advance; a rank that lacks it makes it itself."""

import time
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

import regrow


class Ahead:
    def __init__(self, rank: int) -> None:
        self.rank, self.pool, self.coming = rank, ThreadPoolExecutor(1), dict[int, Future[Tensor]]()

    def make(self, step: int) -> Tensor:
        return torch.randn(8, 6, generator=torch.Generator().manual_seed(2 * step + self.rank))

    def __call__(self, step: int) -> Tensor:
        self.coming[step + 1] = self.pool.submit(self.make, step + 1)
        ready = self.coming.pop(step, None)
        return self.make(step) if ready is None else ready.result(timeout=30)


session = regrow.init(seed=10)
batch = Ahead(session.rank)
net = DDP(torch.nn.Linear(6, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
session.protect(net, optimizer)
for step in session.steps(batch, until=120):
    with step as x:
        loss = (net(x)[:, 0] - x.norm(dim=1)).pow(2).mean()
        step.log(loss=loss)
        loss.backward()
        time.sleep(0.02)
        optimizer.step()
        optimizer.zero_grad()
