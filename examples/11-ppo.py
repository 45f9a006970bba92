"""Trains PPO on a vector of environments for each rank, and continues when a rank dies in a rollout or an update.

    regrow run --local-nodes 2 --nproc-per-node 1 --buddy-every 1 examples/11-ppo.py
    regrow kill --rank 1                                   # in another terminal, as often as you like

No other rank has these environments, so regrow keeps a copy of them in the memory of another node after every step.
The class declares no state; gymnasium's `SyncVectorEnv` can take its place.
"""

import sys
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import regrow

LENGTH, CLIP, GAMMA = 32, 0.2, 0.97


class Poles:
    """Poles to keep upright by pushes to the left or to the right."""

    def __init__(self, count: int, seed: int) -> None:
        self.random, self.count = np.random.default_rng(seed), count
        self.tilt = self.random.normal(0, 0.05, (count, 2)).astype(np.float32)

    def step(self, pushes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Push each pole; fallen ones are stood up again."""
        wind = self.random.normal(0, 0.01, self.count)
        speed = self.tilt[:, 1] + 0.1 * self.tilt[:, 0] + 0.03 * (2 * pushes - 1) + wind
        self.tilt = np.stack([self.tilt[:, 0] + 0.2 * speed, speed], 1).astype(np.float32)
        fallen = np.abs(self.tilt[:, 0]) > 0.3
        self.tilt[fallen] = self.random.normal(0, 0.05, (int(fallen.sum()), 2))
        return self.tilt, np.where(fallen, -1.0, 0.1).astype(np.float32)


def main() -> None:
    """Train, and print the result."""
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    session = regrow.init(seed=0)  # regrow, instead of init_process_group
    model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 3)))  # two pushes, a value
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    envs = Poles(8, seed=session.rank)
    memory = SimpleNamespace(seen=envs.tilt)  # the first observation of the next step
    session.protect(model, optimizer)  # regrow
    session.protect(envs=envs, memory=memory, part=f"rank{session.rank}")  # regrow
    for step in session.steps(lambda number: None, until=steps):  # regrow
        with step:  # regrow
            seen, actions, old, rewards = [], [], [], []
            for _ in range(LENGTH):
                seen.append(torch.from_numpy(memory.seen))
                policy = model.module(seen[-1])[:, :2].detach().log_softmax(-1)
                actions.append(torch.multinomial(policy.exp(), 1))
                old.append(policy.gather(1, actions[-1]))
                memory.seen, reward = envs.step(actions[-1].squeeze(1).numpy())
                rewards.append(torch.from_numpy(reward))
            returns = [torch.zeros(8)]
            for gained in reversed(rewards):
                returns.insert(0, gained + GAMMA * returns[0])
            target, action, before = torch.stack(returns[:-1]), torch.stack(actions), torch.stack(old)
            for _ in range(4):
                out = model(torch.stack(seen))
                ratio = (out[..., :2].log_softmax(-1).gather(-1, action) - before).exp().squeeze(-1)
                gain = target - out[..., 2].detach()
                worth = torch.min(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain).mean()
                loss = 0.5 * (target - out[..., 2]).pow(2).mean() - worth
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            step.log(reward=torch.stack(rewards).mean())

    print(f"rank {session.rank}: {steps} steps, state {session.digest()}")


if __name__ == "__main__":
    main()
