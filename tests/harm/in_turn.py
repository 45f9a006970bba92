"""Five folds, or a sweep of eight whose points follow from what was found: one script, killed where it is told.

`in_turn.py KIND --folder F --strike "RANK@TRAINING PLACE"`. Without regrow it is torch's own, under torchrun.
"""

import argparse
import json
import os
import random
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Subset, TensorDataset

import regrow

FOLDS, TRIALS, STEPS, SAMPLES = 5, 8, 3, 60
TRAININGS = {
    "folds": [f"fold-{number}" for number in range(FOLDS)],
    "sweep": [f"trial-{number}" for number in range(TRIALS)],
}


@dataclass
class Point:
    """A trial's parameters."""

    lr: float
    width: int


class Study:
    """A search with Optuna's `ask` and `tell`: three points at random, the others near the best one so far."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.found: list[tuple[float, Point]] = []

    def ask(self) -> Point:
        """The next point, by all that was told."""
        if len(self.found) < 3:
            return Point(10 ** self.random.uniform(-3, -1), self.random.choice([4, 8, 16]))
        _, best = min(self.found, key=lambda each: each[0])
        return Point(best.lr * 2 ** self.random.gauss(0, 0.5), best.width + self.random.randrange(3))

    def tell(self, point: Point, value: float) -> None:
        """Take in the result of a point."""
        self.found.append((value, point))


class Script:
    """The script, with the places at which it may die."""

    def __init__(self, kind: str, folder: Path, strikes: list[str]) -> None:
        self.kind, self.folder, self.strikes = kind, folder, strikes
        torch.set_num_threads(1)
        self.session = regrow.init(seed=5)
        inputs = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(1))
        self.data = TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
        self.name = ""

    def at(self, place: str) -> None:
        """End here, where it was asked, once."""
        asked = f"{self.session.rank}@{self.name} {place}"
        if asked not in self.strikes:
            return
        try:
            (self.folder / f"struck {asked}").touch(exist_ok=False)
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)

    def point(self) -> Point:
        """The training's parameters: a fold has the same, a trial what the study says after all before it."""
        if self.kind == "folds":
            return Point(1e-2, 16)
        study = Study(3)
        for result in self.session.results.values():
            study.tell(study.ask(), result["error"])
        self.at("told")
        point = study.ask()
        with (self.folder / "asked").open("a") as file:
            file.write(json.dumps([self.name, self.session.rank, point.lr, point.width]) + "\n")
        return point

    def fold(self) -> tuple[Subset[Any], list[int]]:
        """Samples to train on, and those that are held out."""
        fold = int(self.name.rpartition("-")[2]) if self.kind == "folds" else 0
        return Subset(self.data, [at for at in range(SAMPLES) if at % FOLDS != fold]), list(range(fold, SAMPLES, FOLDS))

    def train(self) -> dict[str, Any]:
        """One training; its result."""
        point, (rest, held_out) = self.point(), self.fold()
        self.at("building")
        net = nn.Sequential(nn.Linear(8, point.width), nn.Dropout(0.1), nn.Tanh(), nn.Linear(point.width, 1))
        model = DistributedDataParallel(net)
        optimizer = torch.optim.AdamW(model.parameters(), lr=point.lr)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        self.session.protect(model, optimizer, schedule=schedule)
        loader = regrow.DataLoader(rest, batch_size=8, shuffle=True)
        for step in self.session.steps(loader, until=STEPS):
            with step as (inputs, targets):
                loss = nn.functional.mse_loss(model(inputs), targets)
                step.log(loss=loss)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                if not step.rehearsal:
                    self.at(f"{step.number}")
                optimizer.step()
                schedule.step()
        self.at("behind")
        net.eval()
        inputs, targets = self.data[held_out]
        error = nn.functional.mse_loss(net(inputs), targets).detach()
        dist.all_reduce(error)
        return {"error": error.item() / self.session.world_size, "digest": self.session.digest()}

    def run(self) -> None:
        """All trainings, and what all ranks have found."""
        try:
            for training in self.session.trainings(TRAININGS[self.kind]):
                self.name = training.name
                training.result = self.train()
                self.at("result")
            self.at("end")
        finally:
            self.at("leaving")
        (self.folder / f"results.{self.session.rank}").write_text(json.dumps(self.session.results))


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=TRAININGS)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--strike", action="append", default=[])
    args = parser.parse_args()
    Script(args.kind, args.folder, args.strike).run()


if __name__ == "__main__":
    main()
