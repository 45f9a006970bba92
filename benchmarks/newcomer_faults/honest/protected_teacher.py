"""A teacher that follows the student by an average, protected; a frozen network beside it, not protected."""

import copy
import time

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import regrow


def main() -> None:
    session = regrow.init(seed=8)
    torch.manual_seed(80)
    frozen = nn.Linear(6, 6).requires_grad_(False).eval()
    student = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 6))
    teacher = copy.deepcopy(student).requires_grad_(False)
    net = DDP(student)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    session.protect(net, optimizer, teacher=teacher)
    for step in session.steps(range(120), until=120):
        with step:
            x = torch.randn(16, 6)
            loss = (net(x) - teacher(x + 0.1 * torch.randn_like(x)) - frozen(x)).pow(2).mean()
            step.log(loss=loss)
            loss.backward()
            time.sleep(0.02)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for mine, theirs in zip(teacher.parameters(), student.parameters(), strict=True):
                    mine.lerp_(theirs, 0.05)


main()
