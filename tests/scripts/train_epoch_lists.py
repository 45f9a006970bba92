"""Counts each epoch in lists and tensors of its own, beside an object that holds the model and odd tensors."""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import regrow

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=8, help="of an epoch")
parser.add_argument("--out", type=Path)
args = parser.parse_args()


class Trainer:
    """Holds the model, tensors that nobody can look at, and a list with its newest first."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.seen = model, 0
        self.freed, self.ragged = torch.ones(4), torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
        self.freed.untyped_storage().resize_(0)
        self.newest = [object(), object()]
        self.scale: Any = None

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Times a tensor that only the first call makes."""
        if self.seen == 0:
            self.scale = torch.full((2,), 0.5)
        scaled: torch.Tensor = loss * self.scale.sum()
        return scaled


torch.set_num_threads(1)
session = regrow.init(seed=3)
model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
session.protect(model, optimizer)
data = torch.randn(240, 16, generator=torch.Generator().manual_seed(5))
loader = DataLoader(TensorDataset(data, data.sum(1, keepdim=True).sin()), batch_size=4, shuffle=True)
trainer, sums = Trainer(model), []

for epoch in session.epochs(loader, 3, length=args.steps):
    losses, total = [], torch.zeros(())
    nested: dict[str, list[Any]] = {"losses": [], "rows": [[0.0] * 400] * 3}
    for step in epoch:
        with step as (x, y):
            loss = trainer.scaled(nn.functional.mse_loss(model(x), y))
            loss.backward()  # type: ignore[no-untyped-call]
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            losses.append(mean)
            nested["losses"].append(mean.item())
            total += mean
            trainer.seen += 1
            trainer.newest.insert(0, object())
            step.log(loss=mean)
            optimizer.step()
            optimizer.zero_grad()
    sums.append([len(losses), float(sum(losses)), len(nested["losses"]), sum(nested["losses"]), float(total)])

if args.out is not None:
    final = {"digest": session.digest(), "sums": sums, "seen": trainer.seen}
    args.out.with_suffix(f".{session.rank}.json").write_text(json.dumps(final))
