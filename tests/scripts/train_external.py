"""A training that asks a simulator which nobody can put back, and which counts how often it was asked.

What it answers depends on that count, so that a question too many shows in all numbers that follow.
"""

import argparse
import json
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import regrow

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--die", nargs="*", default=[], help="RANK@PLACE: each ends this rank once, when it comes there")
parser.add_argument("--node", action="store_true", help="the node's agent is ended with it")
parser.add_argument("--large", action="store_true", help="more in a step than is copied")
parser.add_argument("--odd", action="store_true", help="what cannot be kept")
args = parser.parse_args()

torch.set_num_threads(1)
session = regrow.init(seed=5)


class Simulator:
    """It is somewhere else; here is only the way to it."""

    def __init__(self) -> None:
        self.asked = 0

    def reset(self) -> float:
        self.asked = 0
        return 0.0

    def step(self, action: float) -> Any:
        self.asked += 1
        with args.out.with_suffix(f".asked-{session.rank}").open("a+") as file:
            file.write(f"{action:.6f}\n")
            file.seek(0)
            count = len(file.readlines())
        seen = torch.arange(3.0) + count
        if args.odd:
            return {"seen": [seen, self]}
        return {"seen": seen, "reward": (1.0 / count, "well"), "more": bytes(20 << 20 if args.large else 2)}


def comes_to(place: str) -> None:
    here = f"{session.rank}@{place}"
    if here in args.die:
        try:
            args.out.with_suffix(f".died-{here.replace(' ', '-')}").touch(exist_ok=False)
        except FileExistsError:
            return
        if args.node:
            os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


simulator = Simulator()
comes_to("set-up")
model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.Linear(8, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
session.protect(model, optimizer)
like: dict[str, Any] = {"seen": torch.zeros(3), "reward": (0.0, ""), "more": b""}


def ask(action: float) -> Any:
    return simulator.step(action + float(torch.rand(())))


for step in session.steps(lambda number: torch.full((3,), float(number + session.rank)), until=args.steps):
    with step as batch:
        if not step.rehearsal:
            comes_to(f"before {step.number}")
        first = step.external(lambda: ask(0.5), like=like)
        if not step.rehearsal:
            comes_to(f"between {step.number}")
        second = step.external(partial(ask, float(first["seen"].sum())), like=like)
        if not step.rehearsal:
            comes_to(f"drawn {step.number}")
        first["seen"].add_(second["seen"])  # what a body does to its own copy is undone with it
        loss = (model(batch + first["seen"]) * (1.0 + second["reward"][0])).square().mean()
        step.log(loss=loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

args.out.with_suffix(f".{session.rank}.json").write_text(json.dumps({"digest": session.digest()}))
