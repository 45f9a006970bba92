"""A policy moves in the script's own environments, which keep their state between bodies."""

import time

import torch
import torch.nn as nn
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

import regrow

FAULT = "worlds[i].place"
NAMED = ("worlds", "Walk")


class Walk:
    def __init__(self, length: int) -> None:
        self.length, self.place, self.age = length, 0, 0

    def observe(self) -> Tensor:
        return torch.tensor([self.place / self.length, self.age / 50])

    def move(self, right: bool) -> float:
        self.place = max(0, self.place + (1 if right else -1))
        self.age += 1
        if self.place == self.length or self.age == 50:
            reward, self.place, self.age = float(self.place == self.length), 0, 0
            return reward
        return -0.01


session = regrow.init(seed=21)
policy = DDP(nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2)))
optimizer = torch.optim.RMSprop(policy.parameters(), lr=3e-3)
session.protect(policy, optimizer)
worlds = [Walk(5 + n) for n in range(4)]

for step in session.steps(range(120), until=120):
    with step:
        seen = torch.stack([world.observe() for world in worlds])
        chances = torch.distributions.Categorical(logits=policy(seen))
        action = chances.sample()
        rewards = torch.tensor([world.move(bool(a)) for world, a in zip(worlds, action.tolist(), strict=True)])
        loss = -(chances.log_prob(action) * (rewards + 0.1)).mean() - 0.01 * chances.entropy().mean()
        step.log(loss=loss)
        loss.backward()
        time.sleep(0.02)
        optimizer.step()
        optimizer.zero_grad()
