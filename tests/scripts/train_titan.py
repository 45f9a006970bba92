"""The adapter of torchtitan around a stand-in for its `Trainer`."""

import argparse
import json
from pathlib import Path
from types import SimpleNamespace

import titan_stand_in  # type: ignore[import-not-found]  # beside this script
import torch
from torch.utils.data import DataLoader, Dataset

from regrow_recipes.adapters.torchtitan import recoverable

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--out", type=Path)
options = parser.parse_args()


class Rows(Dataset[tuple[dict[str, torch.Tensor], torch.Tensor]]):
    """Random tokens, of which each row ignores another number."""

    def __init__(self) -> None:
        self.tokens = torch.randint(16, (40, 7), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        labels = self.tokens[index, 1:].clone()
        labels[: index % 3] = -100
        return {"input": self.tokens[index, :-1]}, labels


config = SimpleNamespace(
    checkpoint=SimpleNamespace(load_step=-1),
    training=SimpleNamespace(steps=options.steps),
    validator=SimpleNamespace(enable=False),
)
trainer = recoverable(titan_stand_in.Trainer)(config, loader=DataLoader(Rows(), batch_size=4), seed=3)
trainer.train()
rank = trainer.session.rank
report = {
    "digest": trainer.session.digest(),
    "rank": rank,
    "progress": trainer.state_dict(),
    "last": trainer.metrics_processor.lines[-1],
    "saved": trainer.saved[-1],
}
options.out.with_suffix(f".{rank}.json").write_text(json.dumps(report))
