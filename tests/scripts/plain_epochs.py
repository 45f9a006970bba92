"""A training by epochs as people write it: DDP, an evaluation after each, the best weights, no word of regrow."""

import argparse
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def train(model: Any, loader: Any, optimizer: Any, epoch: int) -> None:
    for i, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

        if i == 0 and dist.get_rank() == 0:
            print(f"epoch {epoch} begins with a loss of {loss.item():.3f}", flush=True)


def evaluate(model: Any, loader: Any) -> float:
    model.eval()
    with torch.no_grad():
        total = torch.stack([nn.functional.mse_loss(model(x), y) for x, y in loader]).mean()
    model.train()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=4)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    inputs = torch.randn(128, 8, generator=torch.Generator().manual_seed(0))
    dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
    sampler: Any = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
    best, bad = float("inf"), 0
    for epoch in range(1, args.epochs + 1):
        sampler.set_epoch(epoch)
        train(model, loader, optimizer, epoch)
        scheduler.step()
        score = evaluate(model, loader)
        best, bad = (score, 0) if score < best else (best, bad + 1)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {score:.6f}, best {best:.6f}", flush=True)
        if bad >= 3:
            break
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    rate, total = scheduler.get_last_lr()[0], float(weights.double().sum())
    print(f"rank {dist.get_rank()}: lr {rate:.6f}, best {best.hex()}, weights {total.hex()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
