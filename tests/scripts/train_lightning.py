"""A small training by Lightning: validation, early stopping, checkpoints, a schedule, callbacks of one's own."""

import argparse
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytorch_lightning as L
import torch
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from regrow_recipes.adapters.lightning import Trainer

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--out", type=Path)
parser.add_argument("--die-in-validation", type=int, nargs=2, default=(-1, -1), metavar=("RANK", "STEP"))
parser.add_argument("--in-order", action="store_true", help="no shuffling, no dropout")
parser.add_argument("--stock", action="store_true", help="the Trainer of Lightning itself")
options = parser.parse_args()
inputs = torch.randn(100, 16, generator=torch.Generator().manual_seed(5))
targets = inputs.sum(1, keepdim=True).sin()


class Model(L.LightningModule):  # type: ignore[misc]
    """As scripts have it."""

    def __init__(self) -> None:
        super().__init__()
        dropout = 0.0 if options.in_order else 0.2
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(dropout), nn.Linear(32, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", nn.functional.mse_loss(self.net(x), y), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Counting(L.Callback):  # type: ignore[misc]
    """Counts what it hears, by step; and dies once where it is told to."""

    def __init__(self) -> None:
        self.heard: dict[str, list[int]] = {}
        self.history: list[dict[str, float]] = []

    def _hear(self, event: str, trainer: Any) -> None:
        self.heard.setdefault(event, []).append(trainer.global_step)

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self._hear("begin", trainer)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self._hear("end", trainer)

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        self._hear("epoch", trainer)

    def on_validation_epoch_end(self, trainer: Any, *_: Any) -> None:
        if not trainer.sanity_checking:
            self._hear("validation", trainer)

    def on_validation_batch_start(self, trainer: Any, *_: Any) -> None:
        rank, step = options.die_in_validation
        mark = options.out.with_suffix(".died")
        if (trainer.global_rank, trainer.global_step) == (rank, step) and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class History(L.Callback):  # type: ignore[misc]
    """Keeps the metrics of each epoch, as state that is told."""

    def __init__(self) -> None:
        self.lines: list[dict[str, float]] = []

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        names = ("train_loss_epoch", "val_loss")
        self.lines.append({name: float(trainer.callback_metrics[name]) for name in names})

    def state_dict(self) -> dict[str, Any]:
        return {"lines": self.lines}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.lines = list(state_dict["lines"])


torch.manual_seed(3)
model = Model()
counting, history = Counting(), History()
folder = options.out.parent / "checkpoints"  # what a callback keeps of it is state: the same in all runs
saved = ModelCheckpoint(dirpath=folder, monitor="val_loss", save_top_k=2, mode="min")
stopping = EarlyStopping(monitor="val_loss", patience=50)
make: Any = Trainer
more: dict[str, Any] = {"seed": 3}
if options.stock:
    make, more = L.Trainer, {"devices": int(os.environ["LOCAL_WORLD_SIZE"])}
trainer = make(
    accelerator="cpu",
    max_steps=options.steps,
    accumulate_grad_batches=2,
    gradient_clip_val=1.0,
    callbacks=[counting, history, saved, stopping],
    default_root_dir=options.out.with_suffix(".root"),
    enable_progress_bar=False,
    enable_model_summary=False,
    log_every_n_steps=2,
    use_distributed_sampler=True,
    **more,
)
count = 96 if options.in_order else 100
data = TensorDataset(inputs[:count], targets[:count])
# Lightning's own sampler shuffles, whatever the loader says.
world, place = (int(os.environ[name]) for name in ("WORLD_SIZE", "RANK"))
sampler: Any = DistributedSampler(data, world, place, shuffle=False) if options.stock else None
loader = DataLoader(data, batch_size=4, sampler=sampler, shuffle=None if options.in_order else True)
held_out = DataLoader(TensorDataset(inputs[:11], targets[:11]), batch_size=2)
trainer.fit(model, loader, held_out)

rank = trainer.global_rank
report = {
    "digest": "" if options.stock else trainer.session.digest(),
    "history": history.lines,
    "best": [Path(saved.best_model_path).name, float(saved.best_model_score)],
    "files": sorted(path.name for path in Path(saved.dirpath).iterdir()) if rank == 0 else [],
    "rank": rank,
    "place": [trainer.global_rank, trainer.world_size, trainer.global_step, trainer.current_epoch],
    "heard": counting.heard,
}
options.out.with_suffix(f".{rank}.json").write_text(json.dumps(report))
