"""A data set weighs its samples by the losses that the body reports to it."""

import time

import numpy as np
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import Dataset

import regrow

FAULT = "dataset.difficulty"
NAMED = ("dataset", "HardFirst")


class HardFirst(Dataset[Tensor]):
    def __init__(self) -> None:
        self.rows = torch.randn(64, 5, generator=torch.Generator().manual_seed(3))
        self.difficulty = np.ones(64)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index] * float(self.difficulty[index])

    def tell(self, indices: list[int], losses: list[float]) -> None:
        self.difficulty[indices] = 0.9 * self.difficulty[indices] + 0.1 * np.array(losses)


def main() -> None:
    session = regrow.init(seed=43)
    dataset = HardFirst()
    net = DDP(torch.nn.Linear(5, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    session.protect(net, optimizer)
    for step in session.steps(range(120), until=120):
        with step:
            indices = [(step.number * 8 + n * session.world_size + session.rank) % 64 for n in range(8)]
            x = torch.stack([dataset[index] for index in indices])
            each = (net(x)[:, 0] - 1).pow(2)
            dataset.tell(indices, each.tolist())
            loss = each.mean()
            step.log(loss=loss)
            loss.backward()
            time.sleep(0.02)
            optimizer.step()
            optimizer.zero_grad()


main()
