"""A loader with workers, dropout, batch norm, a schedule: all of it protected."""

import time

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

import regrow


def main() -> None:
    session = regrow.init(seed=1)
    g = torch.Generator().manual_seed(0)
    data: TensorDataset = TensorDataset(torch.randn(400, 6, generator=g), torch.randint(0, 3, (400,), generator=g))
    net = DDP(nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3)))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 120)
    session.protect(net, optimizer, scheduler)
    losses: list[float] = []
    for step in session.steps(DataLoader(data, batch_size=16, shuffle=True), until=120):
        with step as batch:
            x, y = batch
            loss: Tensor = nn.functional.cross_entropy(net(x), y)
            step.log(loss=loss)
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            time.sleep(0.02)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if step.committed:
            losses.append(loss.item())


main()
