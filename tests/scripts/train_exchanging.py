"""A game whose steps exchange what its class has for all objects, in all steps or from one on; each step reads it."""

import argparse
import json
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import regrow

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--out", type=Path)
parser.add_argument("--what", required=True)
parser.add_argument("--since", type=int, default=0, help="the first step that exchanges it")
parser.add_argument("--only", type=int, default=-1, help="the only rank that does; its game is its own then")
args = parser.parse_args()


class Game:
    """Moves a place by what its class has."""

    count = 0
    seen: tuple[int, ...] = ()
    moves: ClassVar[list[float]] = [0.5]
    wind: ClassVar[torch.Tensor] = torch.zeros(2)

    def __init__(self) -> None:
        self.place = 1.0
        self.also: Any = None

    def gain(self, by: float = 1.0) -> float:
        """Is exchanged for others."""
        return by

    def value(self) -> float:
        """Depends on all that may be exchanged."""
        more = self.also() if callable(self.also) else 0.0
        return self.place + self.count + len(self.seen) + sum(self.moves) + float(self.wind.sum()) + self.gain() + more


def exchange(game: Game, number: int) -> None:
    """Exchange it for what follows from the step's number and the former."""
    if args.what == "number":
        Game.count += 1
    elif args.what == "tuple":
        Game.seen = (*Game.seen, number)
    elif args.what == "list":
        Game.moves = [*Game.moves, number / 8]
    elif args.what == "tensor":
        Game.wind = Game.wind + number
    elif args.what == "new":
        Game.best = max(getattr(Game, "best", 0), number)  # type: ignore[attr-defined]
        game.place += Game.best  # type: ignore[attr-defined]
    elif args.what == "function":
        Game.gain = lambda self, by=number: by / 4  # type: ignore[method-assign]
    elif args.what == "optimizer":
        step_aside()
    elif args.what == "own-function":
        game.also = lambda by=number: by / 4


def step_aside() -> None:
    """Steps an optimizer that nobody protects."""
    aside(torch.ones(1, 4)).sum().backward()
    beside.step()


session = regrow.init(seed=3)
aside = nn.Linear(4, 1)
beside = torch.optim.SGD(aside.parameters(), lr=1e-2)
model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
game = Game()
if args.only < 0:
    session.protect(model, optimizer, game=game)
else:
    session.protect(model, optimizer)
    session.protect(game=game, part=f"rank{session.rank}")
numbers = torch.Generator().manual_seed(5)
inputs = torch.randn(96, 4, generator=numbers)
loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4, shuffle=True)

for step in session.steps(loader, until=args.steps):
    with step as (x, y):
        if step.number >= args.since and args.only in (-1, session.rank) and not (args.since and step.rehearsal):
            exchange(game, step.number)
        loss = nn.functional.mse_loss(model(x), y * (game.value() + aside.weight.detach().sum()))
        step.log(loss=loss)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

if args.out is not None:
    final = {"digest": session.digest(), "value": game.value(), "rank": session.rank}
    args.out.with_suffix(f".{session.rank}.json").write_text(json.dumps(final))
