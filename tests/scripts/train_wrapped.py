"""DDP in all places where scripts have it: below `torch.compile`, inside another module, and made after `protect`."""

import argparse
import json
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import regrow

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--out", type=Path)
args = parser.parse_args()


class Box(nn.Module):
    """A model that has its replicated part inside."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x)
        return out


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 16))


torch.set_num_threads(1)
session = regrow.init(seed=3)
first: nn.Module = torch.compile(DistributedDataParallel(net()), backend="eager")  # type: ignore[assignment]
second = Box(DistributedDataParallel(net(), bucket_cap_mb=0.002))
last, words = net(), nn.Embedding(40, 16, sparse=True)
dense = [*first.parameters(), *second.parameters(), *last.parameters()]
optimizers = [torch.optim.AdamW(dense, lr=1e-2), torch.optim.SGD(words.parameters(), lr=0.1)]
session.protect(first, second, last, words, *optimizers)
third = DistributedDataParallel(last, bucket_cap_mb=0.002)
table = DistributedDataParallel(words)

numbers = torch.Generator().manual_seed(5)
tokens = torch.randint(0, 40, (240, 3), generator=numbers)
inputs = torch.randn(240, 16, generator=numbers)
loader = DataLoader(TensorDataset(tokens, inputs), batch_size=6, shuffle=True)

for step in session.steps(loader, until=args.steps):
    with step as (token, x):
        loss = third(second(first(table(token).mean(1) + x))).square().mean()
        step.log(loss=loss)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

if args.out is not None:
    args.out.with_suffix(f".{session.rank}.json").write_text(json.dumps({"digest": session.digest()}))
