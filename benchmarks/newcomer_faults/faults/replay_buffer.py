"""DQN's replay buffer: earlier transitions, from which batches are drawn."""

import random
import time

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import regrow

FAULT = "buffer.items"
NAMED = ("buffer", "Replay")


class Replay:
    def __init__(self) -> None:
        self.items: list[tuple[Tensor, float]] = []

    def add(self, seen: Tensor, reward: float) -> None:
        self.items.append((seen, reward))

    def sample(self, count: int) -> tuple[Tensor, Tensor]:
        chosen = random.choices(self.items, k=count)
        return torch.stack([seen for seen, _ in chosen]), torch.tensor([reward for _, reward in chosen])


def main() -> None:
    session = regrow.init(seed=35)
    q = DDP(nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.Adam(q.parameters(), lr=5e-3)
    session.protect(q, optimizer)
    buffer = Replay()
    for step in session.steps(range(120), until=120):
        with step:
            for _ in range(4):
                seen = torch.randn(3)
                buffer.add(seen, float(seen.sum().sin()))
            x, y = buffer.sample(8)
            loss = nn.functional.smooth_l1_loss(q(x)[:, 0], y)
            step.log(loss=loss)
            loss.backward()
            time.sleep(0.02)
            optimizer.step()
            optimizer.zero_grad()


main()
