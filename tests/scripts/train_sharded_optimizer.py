"""An optimizer that shards itself: matrices belong to one rank each, of vectors each rank updates some rows."""

import argparse
import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import regrow

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--out", type=Path)
parser.add_argument("--protect", choices=["plain", "part", "apart"], required=True)
args = parser.parse_args()

torch.set_num_threads(1)


class Sharded(torch.optim.Optimizer):
    """Momentum whose state each rank keeps for what it updates: whole matrices in turn, rows of all that is no matrix.

    Equal names and shapes on all ranks, where the rows are concerned.
    """

    def __init__(self, model: nn.Module, lr: float = 0.05) -> None:
        every = list(model.parameters())
        groups = [
            {"params": [each for each in every if each.ndim == 2], "kind": "matrices"},
            {"params": [each for each in every if each.ndim != 2], "kind": "rows"},
        ]
        super().__init__(groups, {"lr": lr, "momentum": 0.9})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        rank, world = dist.get_rank(), dist.get_world_size()
        for group in self.param_groups:
            for at, each in enumerate(group["params"]):
                if group["kind"] == "matrices":
                    dist.all_reduce(each.grad, op=dist.ReduceOp.AVG)
                    if at % world == rank:
                        self._move(each, each, each.grad, group)
                    dist.broadcast(each, at % world)
                else:
                    rows = each.shape[0] // world
                    gradient = torch.empty_like(each[:rows])
                    dist.reduce_scatter_tensor(gradient, each.grad, op=dist.ReduceOp.AVG)
                    mine = each[rank * rows : (rank + 1) * rows]
                    self._move(each, mine, gradient, group)
                    dist.all_gather_into_tensor(each, mine.clone())

    def _move(self, of: torch.Tensor, mine: torch.Tensor, gradient: torch.Tensor, group: dict[str, float]) -> None:
        state = self.state[of]
        if not state:
            state["momentum"] = torch.zeros_like(mine)
        state["momentum"].mul_(group["momentum"]).add_(gradient)
        mine.sub_(group["lr"] * state["momentum"])


session = regrow.init(seed=3)
torch.manual_seed(3)
model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))
optimizer = Sharded(model)
if args.protect == "plain":
    session.protect(model, optimizer)
elif args.protect == "part":
    session.protect(model, optimizer, part=f"rank{session.rank}")
else:
    session.protect(model)
    session.protect(optimizer=optimizer, part=f"rank{session.rank}")


def batch(number: int) -> torch.Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * number + session.rank))


for step in session.steps(batch, until=args.steps):
    with step as x:
        loss = (model(x) - x[:, :4].sin()).square().mean()
        step.log(loss=loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

if args.out is not None:
    args.out.with_suffix(f".{session.rank}.json").write_text(json.dumps({"digest": session.digest()}))
