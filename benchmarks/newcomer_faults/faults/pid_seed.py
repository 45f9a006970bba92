"""Each process augments by a numpy generator that is seeded by its process id, anew for each sample."""

import os
import time

import numpy as np
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset

import regrow

FAULT = "Crops.seed (os.getpid())"
NAMED = ("seed", "getpid", "Crops", "process id")


class Crops(Dataset[Tensor]):
    def __init__(self) -> None:
        self.rows = torch.randn(256, 12, generator=torch.Generator().manual_seed(0))
        self.seed = os.getpid()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        start = int(np.random.default_rng([self.seed, index]).integers(0, 5))
        return self.rows[index, start : start + 8]


session = regrow.init(seed=28)
net = DDP(torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
session.protect(net, optimizer)
for step in session.steps(DataLoader(Crops(), batch_size=8, shuffle=True), until=120):
    with step as x:
        loss = (net(x) - x[:, :2].cos()).pow(2).mean()
        step.log(loss=loss)
        loss.backward()
        time.sleep(0.02)
        optimizer.step()
        optimizer.zero_grad()
