"""A training with a loop of its own, by habit: what it counts, what it draws before the loop, and what it steps."""

import argparse
import json
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import regrow

parser = argparse.ArgumentParser()
parser.add_argument("--steps-with", choices=["protected", "foreign", "both", "nothing"], default="protected")
parser.add_argument("--draw-first", action="store_true")
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--out", type=Path, required=True)
args = parser.parse_args()


class Net(nn.Module):
    """Counts its forward passes in a buffer."""

    passes: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 1))
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        out: torch.Tensor = self.layers(x)
        return out


class Progress:
    """Progress that a trainer must remember to find its place; many raise it before they update."""

    step = 0

    def state_dict(self) -> dict[str, object]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.step = int(str(state["step"]))


torch.set_num_threads(1)
session = regrow.init(seed=5)
net, progress = Net(), Progress()
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
session.protect(model, optimizer, progress)
foreign = torch.optim.SGD([torch.ones(3, requires_grad=True)], lr=0.1)


@regrow.restartable(training=True)
def fit() -> None:
    if args.draw_first:
        torch.rand(1)  # as a DataLoader draws its base seed
    while progress.step < args.steps:
        source = torch.Generator().manual_seed(1000 * progress.step + session.rank)
        x = torch.randn(6, 16, generator=source)
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True).sin())
        loss.backward()  # type: ignore[no-untyped-call]
        progress.step += 1
        if args.steps_with in ("protected", "both"):
            optimizer.step()
        if args.steps_with in ("foreign", "both"):
            foreign.step()
        optimizer.zero_grad()
    with args.out.with_suffix(".ends").open("a") as ends:
        ends.write(f"{session.rank}\n")


fit()
report = {"digest": session.digest(), "step": progress.step, "passes": int(net.passes)}
args.out.with_suffix(f".{session.rank}.json").write_text(json.dumps(report))
