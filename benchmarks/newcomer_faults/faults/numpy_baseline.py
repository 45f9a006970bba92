"""REINFORCE with a baseline for each arm, an average in a numpy array."""

import time

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

import regrow

FAULT = "bandit.baseline"
NAMED = ("bandit", "Bandit", "baseline")


class Bandit:
    def __init__(self, arms: int) -> None:
        self.means = np.linspace(-1, 1, arms)
        self.baseline = np.zeros(arms)

    def pull(self, arm: np.ndarray) -> np.ndarray:
        reward = self.means[arm] + np.random.normal(0, 0.1, len(arm))
        advantage = reward - self.baseline[arm]
        np.add.at(self.baseline, arm, 0.05 * advantage)
        return advantage


session = regrow.init(seed=27)
bandit = Bandit(6)
net = DDP(torch.nn.Linear(4, 6))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
session.protect(net, optimizer)
for step in session.steps(range(120), until=120):
    with step:
        chances = torch.distributions.Categorical(logits=net(torch.randn(16, 4)))
        arms = chances.sample()
        advantage = torch.from_numpy(bandit.pull(arms.numpy())).float()
        loss = -(chances.log_prob(arms) * advantage).mean()
        step.log(loss=loss)
        loss.backward()
        time.sleep(0.02)
        optimizer.step()
        optimizer.zero_grad()
