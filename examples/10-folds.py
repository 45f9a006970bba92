"""Trains five folds in one script, and continues when a rank dies in a fold, between two, or in the last.

    regrow run --nproc-per-node 2 examples/10-folds.py
    regrow kill --rank 1                                   # in another terminal, as often as you like

A replaced rank skips the finished folds, and builds only the present one. Seeds, the points of a sweep, or a teacher
and its student are written the same way: `training.result` is the value that later ones, and the end, can use.
"""

import sys

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Subset, TensorDataset

import regrow

FOLDS, SAMPLES = 5, 400


def make_data() -> TensorDataset:
    """Points, and a function of them to learn."""
    points = torch.randn(SAMPLES, 8)
    return TensorDataset(points, (points[:, :4].sum(1, keepdim=True) * points[:, 4:5]).tanh())


def main() -> None:
    """Train the folds, and print their mean."""
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    session = regrow.init(seed=1)
    data = make_data()
    for training in session.trainings([f"fold-{fold}" for fold in range(FOLDS)]):
        fold = int(training.name[-1])
        held_out = range(fold, SAMPLES, FOLDS)
        rest = Subset(data, [index for index in range(SAMPLES) if index % FOLDS != fold])
        loader = regrow.DataLoader(rest, batch_size=16, shuffle=True)

        model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        session.protect(model, optimizer)
        for step in session.steps(loader, until=steps):
            with step as (points, wanted):
                loss = nn.MSELoss()(model(points), wanted)
                loss.backward()
                step.log(loss=loss)
                optimizer.step()
                optimizer.zero_grad()

        points, wanted = data[list(held_out)]
        with torch.no_grad():
            error = nn.functional.mse_loss(model.module(points), wanted).item()
        training.result = {"error": error, "state": session.digest()}
        print(f"rank {session.rank}: {training} has {error:.6f} on what it was not shown", flush=True)

    errors = [result["error"] for result in session.results.values()]
    states = " ".join(result["state"][:8] for result in session.results.values())
    print(f"rank {session.rank}: {sum(errors) / len(errors):.6f} over {len(errors)} folds, state {states}", flush=True)


if __name__ == "__main__":
    main()
