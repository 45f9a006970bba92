"""A replay buffer that is the same on all ranks, protected, and drawn from by the step's random numbers."""

import time

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import regrow


class Replay:
    def __init__(self, size: int) -> None:
        self.rows, self.filled = torch.zeros(size, 3), 0

    def state_dict(self) -> dict[str, object]:
        return {"rows": self.rows, "filled": self.filled}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.rows.copy_(state["rows"])
        self.filled = int(state["filled"])

    def add(self, rows: Tensor) -> None:
        for row in rows:
            self.rows[self.filled % len(self.rows)] = row
            self.filled += 1


session = regrow.init(seed=7)
q = DDP(nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 1)))
optimizer = torch.optim.Adam(q.parameters(), lr=5e-3)
buffer = Replay(200)
session.protect(q, optimizer, buffer=buffer)
for step in session.steps(range(120), until=120):
    with step as n:
        buffer.add(torch.randn(4, 3, generator=torch.Generator().manual_seed(n)))
        x = buffer.rows[torch.randint(0, min(buffer.filled, 200), (8,))]
        loss = nn.functional.smooth_l1_loss(q(x)[:, 0], x.sum(1).sin())
        step.log(loss=loss)
        loss.backward()
        time.sleep(0.02)
        optimizer.step()
        optimizer.zero_grad()
