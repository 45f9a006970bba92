"""Features are whitened by Welford statistics in numpy, which every batch moves."""

import time

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

import regrow

FAULT = "norm.mean, norm.m2, norm.count"
NAMED = ("norm", "RunningNorm")


class RunningNorm:
    def __init__(self, size: int) -> None:
        self.mean, self.m2, self.count = np.zeros(size), np.zeros(size), 0

    def update(self, rows: np.ndarray) -> np.ndarray:
        for row in rows:
            self.count += 1
            delta = row - self.mean
            self.mean += delta / self.count
            self.m2 += delta * (row - self.mean)
        return (rows - self.mean) / np.sqrt(self.m2 / self.count + 1e-6)


def main() -> None:
    session = regrow.init(seed=5)
    model = torch.nn.Linear(6, 2)
    ddp = DDP(model)
    opt = torch.optim.Adam(ddp.parameters(), lr=1e-2)
    session.protect(model=ddp, opt=opt)
    norm = RunningNorm(6)
    for step in session.steps(lambda n: np.random.default_rng((n, session.rank)).normal(2.0, 3.0, (12, 6)), until=100):
        with step as rows:
            x = torch.from_numpy(norm.update(rows)).float()
            loss = torch.nn.functional.cross_entropy(ddp(x), (x.sum(1) > 0).long())
            step.log(loss=loss)
            loss.backward()
            time.sleep(0.02)
            opt.step()
            opt.zero_grad()


if __name__ == "__main__":
    main()
