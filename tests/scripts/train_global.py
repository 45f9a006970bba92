"""A small training whose global batch is the same whatever the world, and that can be disturbed in its data."""

import argparse
import sys
import time
from pathlib import Path

import torch
from pacing import pause  # type: ignore[import-not-found]  # beside this script
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import regrow
from regrow.data import PackedTokens

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--out", type=Path, help="not used: it has no results but its records")
parser.add_argument("--remainder", default="wrap")
parser.add_argument("--plain", action="store_true", help="torch's DataLoader, with 6 samples a rank")
parser.add_argument("--opaque", action="store_true", help="a function of the step for a loader")
parser.add_argument("--silent", action="store_true", help="log nothing")
parser.add_argument("--say-steps", action="store_true")
parser.add_argument("--perturb", action="store_true", help="the data set is another one than in other runs")
parser.add_argument("--hold", default="", metavar="STEP:FILE", help="wait in that step until the file is there")
parser.add_argument("--corpus", help="of tokens, packed: read in place")
parser.add_argument("--size", type=int, default=100)
parser.add_argument("--pace", type=float, default=0.0, help="seconds a step lasts more, until there is a file `hurry`")
args = parser.parse_args()

torch.set_num_threads(1)
session = regrow.init(seed=3)
net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1))
model = DistributedDataParallel(net, bucket_cap_mb=0.002)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
session.protect(model, optimizer)

numbers = torch.Generator().manual_seed(5)
inputs = torch.randn(args.size, 16, generator=numbers)
if args.perturb:
    inputs[7] += 1e-3
data = TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())


def batch_of(step: int) -> list[torch.Tensor]:
    rows = [(24 * step + 6 * session.rank + row) % args.size for row in range(6)]
    return [inputs[rows], inputs[rows].sum(1, keepdim=True)]


loader = (
    batch_of
    if args.opaque
    else DataLoader(data, batch_size=6, shuffle=True)
    if args.plain
    else regrow.DataLoader(PackedTokens(args.corpus, 16), global_batch_size=24, shuffle=True, remainder=args.remainder)
    if args.corpus
    else regrow.DataLoader(data, global_batch_size=24, shuffle=True, remainder=args.remainder)
)
held, _, until = args.hold.partition(":")
for step in session.steps(loader, until=args.steps):
    if not step.rehearsal:
        pause(args.pace, step.number, args.steps)
    with step as batch:
        windows = batch["tokens"].float() / 256 if args.corpus else None
        x, y = batch if windows is None else (windows[:, :-1], windows[:, -1:])
        while held == str(step.number) and not step.rehearsal and not Path(until).exists():
            time.sleep(0.005)
        loss = nn.functional.mse_loss(model(x), y)
        if not args.silent:
            step.log(loss=loss)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    if args.say_steps and session.is_main and not step.rehearsal:
        sys.stdout.write(f"step {step.number}\n")
