"""Environments in a library's vector keep places and a numpy generator from one body to the next."""

import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

import regrow

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "vendored"))
from vector_env import VectorCart

FAULT = "envs (its places and its np_random)"
NAMED = ("envs", "VectorCart")


def train() -> None:
    session = regrow.init(seed=0)
    envs = VectorCart(8, seed=session.seed)
    obs = envs.reset()
    critic = DDP(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.05)
    session.protect(critic, optimizer)
    for step in session.steps(range(150), until=150):
        with step:
            value = critic(torch.as_tensor(obs, dtype=torch.float32))
            obs, reward = envs.step(np.sign(obs[:, 0]))
            loss = (value[:, 0] - torch.as_tensor(reward, dtype=torch.float32)).pow(2).mean()
            step.log(loss=loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.02)


train()
