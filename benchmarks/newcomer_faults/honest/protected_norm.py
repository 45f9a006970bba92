"""Running statistics of batches that are the same on all ranks, in an object that is protected."""

import time

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

import regrow


class RunningNorm:
    def __init__(self, size: int) -> None:
        self.mean, self.count = np.zeros(size), 0

    def state_dict(self) -> dict[str, object]:
        return {"mean": torch.from_numpy(self.mean.copy()), "count": self.count}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.mean, self.count = state["mean"].numpy().copy(), int(state["count"])

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        self.count += len(rows)
        self.mean = self.mean + (rows - self.mean).sum(0) / self.count
        return rows - self.mean


session = regrow.init(seed=2)
norm = RunningNorm(5)
net = DDP(torch.nn.Linear(5, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
session.protect(net, optimizer, norm=norm)
for step in session.steps(lambda n: np.random.default_rng(n).normal(1, 2, (8, 5)), until=120):
    with step as rows:
        x = torch.from_numpy(norm(rows)).float()
        loss = (net(x)[:, 0] - x[:, session.rank]).pow(2).mean()
        step.log(loss=loss)
        loss.backward()
        time.sleep(0.02)
        optimizer.step()
        optimizer.zero_grad()
