"""Hard samples are remembered in a database in memory."""

import sqlite3
import time

import torch
from torch.nn.parallel import DistributedDataParallel as DDP

import regrow

FAULT = "hard (sqlite3 in memory)"
NAMED = ("hard", "Connection", "sqlite")


def main() -> None:
    session = regrow.init(seed=40)
    hard = sqlite3.connect(":memory:")
    hard.execute("create table seen (seed integer, loss real)")
    net = DDP(torch.nn.Linear(6, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02)
    session.protect(net, optimizer)
    for step in session.steps(range(120), until=120):
        with step:
            worst = hard.execute("select seed from seen order by loss desc limit 4").fetchall()
            seeds = [row[0] for row in worst] + [4 * step.number + n for n in range(4)]
            x = torch.stack([torch.randn(6, generator=torch.Generator().manual_seed(seed)) for seed in seeds])
            each = (net(x)[:, 0] - x.norm(dim=1)).pow(2)
            hard.executemany("insert into seen values (?, ?)", list(zip(seeds, each.tolist(), strict=True)))
            loss = each.mean()
            step.log(loss=loss)
            loss.backward()
            time.sleep(0.02)
            optimizer.step()
            optimizer.zero_grad()


main()
