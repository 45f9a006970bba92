"""A small training in micro-batches: dropout, uneven weights, AdamW, a schedule, clipping; any world, any wrapper.

What is written at the end: the state's digest, and all parameters and committed losses as numbers.
"""

import argparse
import atexit
import json
import os
import signal
import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from failing import fail_newcomers  # type: ignore[import-not-found]  # beside this script
from pacing import pause  # type: ignore[import-not-found]
from placing import DEVICE, take_place  # type: ignore[import-not-found]
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import regrow
from regrow.comm.process_group import RegrowGroup
from regrow.hydration.shards import is_distributed

WIDTH, BATCH = 40, 4
parser = argparse.ArgumentParser()
parser.add_argument("--mode", choices=["plain", "ddp", "hsdp", "fsdp2"], default="ddp")
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--microbatches", type=int, default=8)
parser.add_argument("--invariant", action="store_true")
parser.add_argument("--tokens", action="store_true", help="weigh by a number that the micro-batch's data decides")
parser.add_argument("--check", action="store_true", help="compare the gradient with that of the global batch")
parser.add_argument("--counts", action="store_true", help="scale data by how many there were, which nobody protects")
parser.add_argument("--no-dropout", action="store_true")
parser.add_argument("--double", action="store_true")
parser.add_argument("--loader-workers", type=int, default=0)
parser.add_argument("--cacheable", dest="loader", action="store_const", const=regrow.DataLoader, default=DataLoader)
parser.add_argument("--shard", type=int, default=2, help="hsdp: ranks of a replica")
parser.add_argument("--die", default="", metavar="RANK:STEP:MICRO", help="killed there once, before its backward")
parser.add_argument("--norm", choices=["layer", "batch"], default="layer")
parser.add_argument("--wrong", choices=["forgets", "twice", "leaves", "plain-backward", ""], default="")
parser.add_argument("--pace", type=float, default=0.0, help="seconds a step lasts more, until there is a file `hurry`")
parser.add_argument("--out", type=Path)
parser.add_argument("--failing", type=int, default=0, help="so many newcomers fail as they build; -1: all")


class Points(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Points, noisy at each reading, with how much each counts; who loads them is noted."""

    def __len__(self) -> int:
        return 500

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        source = torch.Generator().manual_seed(index)
        x = torch.randn(16, generator=source) + 0.01 * torch.randn(16)
        return x, x.sum().sin()[None]


class Net(nn.Module):
    def __init__(self, dropout: float, norm: str) -> None:
        super().__init__()
        made = nn.LayerNorm(WIDTH) if norm == "layer" else nn.BatchNorm1d(WIDTH)
        self.first = nn.Sequential(nn.Linear(16, WIDTH), made, nn.GELU(), nn.Dropout(dropout))
        self.second = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(dropout))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.second(self.first(x)))  # type: ignore[no-any-return]


def wrapped(net: Net, args: argparse.Namespace) -> nn.Module:
    if args.mode == "plain":
        return net
    if args.mode == "ddp":
        return DistributedDataParallel(net, bucket_cap_mb=0.004)
    world = torch.distributed.get_world_size()
    if args.mode == "hsdp":
        mesh = init_device_mesh(DEVICE.type, (world // args.shard, args.shard), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh(DEVICE.type, (world,), mesh_dim_names=("shard",))
    for block in (net.first, net.second):
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net


class Count:
    """Count that a newcomer does not have: a tensor in an object that holds the model, too."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.seen = model, torch.zeros(())

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return x * (1 + 1e-3 * self.seen)


def weight_of(x: torch.Tensor) -> int:
    """1, 2 or 3; 0 now and then."""
    return int(x[0, 0].abs() * 1000) % 4


def batch_of(step: int, share: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Batches of different sizes."""
    source = torch.Generator().manual_seed(1000 * step + share)
    x = torch.randn(1 + share % 3, 16, generator=source)
    return x, x.sum(1, keepdim=True).sin()


def check(model: nn.Module, step: int, count: int) -> None:
    """Raises `SystemExit` unless `grad` is the gradient of the mean over all samples of the step."""
    net = model.module if isinstance(model, DistributedDataParallel) else model
    pieces = [batch_of(step, share) for share in range(count)]
    x, y = (torch.cat(each).to(DEVICE) for each in zip(*pieces, strict=True))
    wanted = torch.autograd.grad(mse_loss(net(x), y), list(net.parameters()))
    for parameter, gradient in zip(net.parameters(), wanted, strict=True):
        if parameter.grad is None or not torch.allclose(parameter.grad, gradient, rtol=1e-11, atol=1e-13):
            raise SystemExit(f"the gradient of step {step} is not that of the mean over the global batch")


def counted() -> Counter[str]:
    """Counts collectives by name from now on."""
    calls: Counter[str] = Counter()
    forward = RegrowGroup.forward

    def counting(group: RegrowGroup, name: str, *rest: Any) -> Any:
        if group.echo is None:
            calls[name] += 1
        return forward(group, name, *rest)

    RegrowGroup.forward = counting  # type: ignore[method-assign, assignment]
    return calls


def note_groups(out: Path | None) -> None:
    """Leave a file `.groups` if this process ends with process groups."""
    if out is not None and torch.distributed.is_initialized():
        out.with_suffix(".groups").touch()


def main() -> None:
    args = parser.parse_args()
    while Path("wait").exists():  # a test holds those who build now
        time.sleep(0.01)
    if args.double:
        torch.set_default_dtype(torch.float64)
    atexit.register(note_groups, args.out)
    session = regrow.init(seed=11, invariant=args.invariant)
    take_place(lambda: session.local_rank)
    fail_newcomers(session, args.failing, args.out)
    model = wrapped(Net(0.0 if args.no_dropout else 0.2, args.norm).to(DEVICE), args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    session.protect(model, optimizer, scheduler)
    loader: Any = args.loader(Points(), batch_size=BATCH, shuffle=True, num_workers=args.loader_workers)
    loader = batch_of if args.check else loader
    killed = [int(part) for part in args.die.split(":")] if args.die else None
    mark = args.out.with_suffix(".died") if args.out is not None else None
    calls, per_step, losses, count = counted(), [], [], Count(model)
    events: list[dict[str, Any]] = []

    def changed(event: regrow.ScaleEvent) -> None:
        events.append(asdict(event) | {"world": session.world_size})
        if args.out is not None:
            args.out.with_suffix(f".{os.getpid()}.events").write_text(json.dumps(events))

    session.on_scale(changed)
    for step in session.steps(loader, until=args.steps, microbatches=args.microbatches):
        calls.clear()
        with step as microbatches:
            for micro in microbatches:
                x, y = micro.batch
                x = count.scaled(x) if args.counts else x
                weight = weight_of(x) if args.tokens else None
                x, y = x.to(DEVICE), y.to(DEVICE)
                loss = mse_loss(model(x), y)
                here = [session.rank, step.number, micro.index - microbatches.share.start]
                if here == killed and mark is not None and not mark.exists() and not step.rehearsal:
                    mark.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                if args.wrong == "forgets" and micro.last:
                    break
                if args.wrong == "leaves":
                    continue
                if args.wrong == "plain-backward":
                    loss.backward()  # type: ignore[no-untyped-call]
                    continue
                micro.log(loss=loss)
                micro.backward(loss, weight=weight)
                if args.wrong == "twice":
                    micro.backward(loss, weight=weight)
            if args.check and not step.rehearsal:
                check(model, step.number, args.microbatches)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            step.log(norm=float(norm.full_tensor() if is_distributed(norm) else norm))  # type: ignore[attr-defined]
            optimizer.step()
            scheduler.step()
        if not step.rehearsal:
            pause(args.pace, step.number, args.steps)
        if step.committed:
            per_step.append(dict(calls))
            losses.append(step.numbers()["loss"])
    if args.out is None:
        return
    whole = [p.full_tensor() if is_distributed(p) else p for p in model.parameters()]  # type: ignore[attr-defined]
    final = {
        "rank": session.rank,
        "digest": session.digest(),
        "values": [float(each.detach().double().sum()) for each in whole],
        "parameters": torch.cat([each.detach().double().flatten() for each in whole]).tolist(),
        "losses": losses,
    }
    args.out.with_suffix(f".{session.rank}.json").write_text(json.dumps(final))
    args.out.with_suffix(f".{session.rank}.calls").write_text(json.dumps(per_step))
    sys.stdout.write("trained\n")


if __name__ == "__main__":
    main()
