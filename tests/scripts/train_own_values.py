"""Each rank sums its own losses, in a variable and in an object, and all are added up at the end.

`--known`: step 5 waits until this worker has heard of which variables ranks have different values.
`--pace`: see `pacing.py`.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pacing import pause  # type: ignore[import-not-found]  # beside this script
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import regrow

LONGEST_S = 60.0
parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--out", type=Path)
parser.add_argument("--known", action="store_true")
parser.add_argument("--pace", type=float, default=0.0)
args = parser.parse_args()


class Meter:
    """The class of many tutorials."""

    def __init__(self) -> None:
        self.sum, self.seen = 0.0, 0

    def update(self, value: float) -> None:
        """One more."""
        self.sum, self.seen = self.sum + value, self.seen + 1


torch.set_num_threads(1)
session = regrow.init(seed=3)
worker: Any = session._worker
model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
session.protect(model, optimizer)
data = torch.randn(240, 16, generator=torch.Generator().manual_seed(5))
loader = DataLoader(TensorDataset(data, data.sum(1, keepdim=True).sin()), batch_size=4, shuffle=True)


def train() -> None:
    """All steps."""
    running, last, meter = 0.0, 0.0, Meter()
    worst: list[float] = []
    for step in session.steps(loader, until=args.steps):
        with step as (x, y):
            until = time.monotonic() + LONGEST_S
            while args.known and step.number == 5 and not worker.control.own and time.monotonic() < until:
                time.sleep(0.01)
            pause(0.0 if step.rehearsal else args.pace, step.number, args.steps)
            loss = nn.functional.mse_loss(model(x), y)
            step.log(loss=loss)
            last = loss.item()
            running += last
            worst = sorted([*worst, last])[-3:]
            meter.update(last)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
    sums = torch.tensor([running, meter.sum, *worst, last], dtype=torch.float64)
    dist.all_reduce(sums)
    if args.out is not None:
        final = {"digest": session.digest(), "sums": sums.tolist(), "seen": meter.seen, "running": running}
        args.out.with_suffix(f".{session.rank}.json").write_text(json.dumps(final))


train()
