"""Trains by epochs: evaluates after each, saves the best weights, and stops when they no longer improve.

regrow run --nproc-per-node 2 --standby 1 examples/05-epochs.py
regrow kill --rank 0                                   # in another terminal, as often as you like
"""

import argparse
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

import regrow

MSE = nn.MSELoss()
Batches = DataLoader[tuple[torch.Tensor, ...]]


def data(samples: int, seed: int) -> TensorDataset:
    """Points, and a function of them."""
    inputs = torch.randn(samples, 8, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())


@regrow.restartable  # regrow: all ranks run it, and run it again if one dies in it
def end_epoch(session: regrow.Session, model: DDP, loader: Batches, kept: SimpleNamespace, path: str) -> float:
    """The mean loss of all ranks. If it is the lowest so far, rank 0 saves the weights, and the others wait for it."""
    model.module.eval()
    with torch.no_grad():
        total = torch.stack([MSE(model.module(x), y) for x, y in loader]).mean()
    model.module.train()
    dist.all_reduce(total)
    score = float(total) / dist.get_world_size()
    kept.best, kept.bad = min(score, kept.best), 0 if score < kept.best else kept.bad + 1
    if kept.bad == 0:
        if session.is_main:
            torch.save(model.module.state_dict(), path)
        dist.barrier()
    return score


def main() -> None:
    """Train, and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--out", default="best.pt")
    args = parser.parse_args()
    session = regrow.init(seed=0)  # regrow, instead of init_process_group

    model = DDP(nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)
    kept = SimpleNamespace(best=float("inf"), bad=0)
    session.protect(model, optimizer, scheduler, kept)  # regrow

    loader, held_out = DataLoader(data(args.samples, 0), 32, shuffle=True), DataLoader(data(512, 1), 64)
    for epoch in session.epochs(loader, args.epochs):  # regrow, instead of range(args.epochs)
        for step in epoch:  # regrow, instead of `for x, y in loader`
            with step as (x, y):  # regrow
                loss = MSE(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        scheduler.step()
        score = end_epoch(session, model, held_out, kept, args.out)
        if session.is_main:
            print(f"epoch {epoch.number}: {score:.4f}, {kept.bad} epochs without a better one", flush=True)
        if kept.bad >= 3:
            break

    print(f"rank {session.rank}: best {kept.best:.6f}, state {session.digest()}")


if __name__ == "__main__":
    main()
