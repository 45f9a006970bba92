"""Hands values in variables from body to body; most stay as they are at first. `--own`: each rank has others."""

import argparse
import json
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import regrow

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--out", type=Path)
parser.add_argument("--own", action="store_true", help="environments of each rank's own, which it protects by itself")
parser.add_argument("--since", type=int, default=3, help="the first step that changes what stays at first")
args = parser.parse_args()


class Game:
    """An environment: ends episodes by its rank and its time."""

    def __init__(self, rank: int) -> None:
        self.rank, self.time = rank, 0

    def reset(self) -> torch.Tensor:
        """Begin anew."""
        self.time = 0
        return torch.zeros(2)

    def step(self, action: float) -> tuple[torch.Tensor, np.ndarray, float]:
        """One move: what is seen, which episodes have ended, a reward."""
        self.time += 1
        ended = self.time >= args.since and (self.time + self.rank) % 2 == 0
        return torch.full((2,), self.time / 10), np.full(3, ended), action + self.time / 8


session = regrow.init(seed=3)
model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
game = Game(session.rank if args.own else 0)
if args.own:
    session.protect(model, optimizer)
    session.protect(game=game, part=f"rank{session.rank}")
else:
    session.protect(model, optimizer, game=game)
numbers = torch.Generator().manual_seed(5)
inputs = torch.randn(96, 4, generator=numbers)
loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4, shuffle=True)

game.reset()
next_done, mask, rewards = torch.zeros(3), np.zeros(3, dtype=bool), 0.0
wind = torch.zeros(2)
hidden: Any = None
last: deque[torch.Tensor] = deque([torch.zeros(1)], maxlen=3)
rate = 1e-2
trace: list[torch.Tensor] = []
history: dict[str, list[tuple[int, torch.Tensor]]] = {"sums": []}
many = [torch.zeros(())] * 1_500
every = [0.0] * 3_000
"""Lists that bodies only add to."""


def blow(number: int) -> None:
    """Changes a variable of the module."""
    global wind
    wind = wind * 0.5 + max(number - args.since, 0)


for step in session.steps(loader, until=args.steps):
    with step as (x, y):
        hidden = hidden if hidden is not None else (torch.zeros(1), torch.zeros(1))
        scale = 1 + next_done.sum() + float(mask.sum()) + rewards + wind.sum() + hidden[0] + sum(last)
        seen, ended, reward = game.step(0.5)
        next_done = torch.from_numpy(ended).float()
        mask[:] = ended & (step.number % 3 == 0)
        last.append(next_done[:1] * step.number)
        blow(step.number)
        loss = nn.functional.mse_loss(model(x), y * scale / 8)
        hidden = (hidden[1].detach() + next_done[:1], loss.detach().reshape(1) * 0 + step.number / 4)
        rewards += np.float64(reward if step.number >= args.since else 0.0)
        step.log(loss=loss)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        rate = rate * 0.9 if step.number >= args.since else rate
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        alike = next(model.parameters()).sum()
        trace.append(alike.detach())
        history["sums"].append((step.number, alike))
        many.append(alike.detach())
        every.append(alike.item())

if args.out is not None:
    final = {"digest": session.digest(), "rank": session.rank, "rewards": float(rewards), "rate": rate}
    final |= {"trace": [float(each) for each in trace], "history": [(at, float(each)) for at, each in history["sums"]]}
    final |= {"many": [float(each) for each in many[1_500:]], "every": every[3_000:]}
    args.out.with_suffix(f".{session.rank}.json").write_text(json.dumps(final))
