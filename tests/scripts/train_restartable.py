"""Functions that are run again: an evaluation between steps (`--mode between`), a trainer with a loop of its own."""

import argparse
import json
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import regrow

parser = argparse.ArgumentParser()
parser.add_argument("--mode", choices=["between", "training", "unwrapped", "unseen"], default="between")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--out", type=Path)
args = parser.parse_args()

torch.set_num_threads(1)
session = regrow.init(seed=3)
net = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1))
model = DistributedDataParallel(net, bucket_cap_mb=0.002)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
found: list[float] = []


class Progress:
    """Progress that a trainer must remember to find its place."""

    def __init__(self) -> None:
        self.step = 0
        self.scores: list[float] = []

    def state_dict(self) -> dict[str, object]:
        return {"step": self.step, "scores": list(self.scores)}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.step, self.scores = int(str(state["step"])), list(state["scores"])  # type: ignore[call-overload]


progress = Progress()
session.protect(model, optimizer, progress)


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(6, 16, generator=torch.Generator().manual_seed(1000 * step + rank))
    return inputs, inputs.sum(1, keepdim=True).sin()


def score() -> float:
    """The loss on data that is split over the ranks; several collectives."""
    model.eval()
    total = torch.zeros(2)
    with torch.no_grad():
        for part in range(3):
            x, y = batch(10_000 + part, session.rank)
            pair = torch.stack([nn.functional.mse_loss(net(x), y, reduction="sum"), torch.tensor(float(len(x)))])
            dist.all_reduce(pair)
            total += pair
    model.train()  # type: ignore[no-untyped-call]
    return float(total[0] / total[1])


evaluate = score if args.mode.startswith("un") else regrow.restartable(score)
DEADLY = {"unwrapped": 5, "unseen": 2}
"""The step behind which rank 1 dies once; the first evaluation is behind step 2."""
LOOKS = 20
"""In a row, a hundredth of a second apart."""


def die_once() -> None:
    """Rank 1 dies when the others have left the step, and wait in the evaluation's first collective."""
    mark = args.out.with_suffix(".died")
    if mark.exists():
        return
    args.out.with_suffix(f".evaluates.{os.getpid()}").touch()
    if session.rank == 1:
        until_others_wait()
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def until_others_wait() -> None:
    """Returns when all others have come to the evaluation and sleep: who still computes before its collective runs."""
    deadline, looks = time.monotonic() + 60, 0
    while looks < LOOKS:
        assert time.monotonic() < deadline, "the others do not come to the evaluation"
        time.sleep(0.01)
        there = {int(path.suffix[1:]) for path in args.out.parent.glob(f"{args.out.stem}.evaluates.*")} - {os.getpid()}
        asleep = all(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("S") for pid in there)
        looks = looks + 1 if asleep and len(there) == session.world_size - 1 else 0


@regrow.restartable(training=True)
def fit(steps: int) -> None:
    while progress.step < steps:
        x, y = batch(progress.step, session.rank)
        torch.manual_seed(100 * progress.step + session.rank)
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        progress.step += 1
        optimizer.step()
        optimizer.zero_grad()


if args.mode == "training":
    fit(args.steps)
else:
    for step in session.steps(lambda number: batch(number, session.rank), until=args.steps):
        with step as (x, y):
            loss = nn.functional.mse_loss(model(x), y)
            step.log(loss=loss)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        if step.number % 3 == 2:
            if step.number == DEADLY.get(args.mode) and step.committed:
                die_once()
            first = evaluate()
            second = evaluate()
            if step.committed:
                assert first == second, (first, second)
                found.append(first)

if args.out is not None:
    report = {"digest": session.digest(), "last": found[-1:], "rank": session.rank}
    args.out.with_suffix(f".{session.rank}.json").write_text(json.dumps(report))
