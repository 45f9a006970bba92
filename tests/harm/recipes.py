"""Scripts composed of habits: a choice of each kind makes a training loop, and a name from which it is made again."""

import contextlib
import random
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from tests.harm.frame import WIDTH, Trial, batch, ddp, mlp, mse
from tests.harm.table import RECIPE, Habit
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import regrow

CHOICES: dict[str, tuple[str, ...]] = {
    "zero": ("last", "first", "last, kept"),
    "accumulation": ("none", "no_sync", "plain"),
    "optimizer": ("adamw", "sgd", "two"),
    "scaler": ("none", "scales", "unscales"),
    "clip": ("none", "norm", "value"),
    "scheduler": ("none", "in the body", "behind, guarded", "behind", "behind each third"),
    "ema": ("none", "in the body", "first", "behind, guarded", "behind"),
    "log": ("early", "late", "behind", "none"),
    # One that is not marked is at step 0 too: the first that the rehearsal did not show is not mended (0029).
    "evaluation": ("none", "marked", "not marked", "of the main rank"),
    "model": ("plain", "dropout", "batchnorm"),
    "data": ("function", "loader"),
    "protected": ("all", "no scheduler", "no ema", "no scaler"),
}
"""Choices between several ways to write something; the first is the plainest."""
EVERY = 3
"""Steps from one evaluation, and one move of a scheduler that is not moved each time, to the next."""


@dataclass(frozen=True)
class Recipe:
    """One way of each: as many digits as there are choices."""

    digits: str

    def __getitem__(self, choice: str) -> str:
        return CHOICES[choice][int(self.digits[list(CHOICES).index(choice)])]

    def __str__(self) -> str:
        return ", ".join(f"{choice}: {self[choice]}" for choice in CHOICES)


def composed(seed: int) -> Recipe:
    """One drawn way of each."""
    draw = random.Random(seed)
    return Recipe("".join(str(draw.randrange(len(ways))) for ways in CHOICES.values()))


def habit_of(name: str) -> Habit:
    """The habit that a name stands for."""
    recipe = Recipe(name.removeprefix(RECIPE))
    marked = recipe["evaluation"] == "marked"
    # Running statistics are of rank 0's batches under DDP, and of all under regrow.
    compared = recipe["model"] != "batchnorm"
    return Habit(name, "", str(recipe), partial(train, recipe), between=marked, compared=compared)


class Training:
    """The objects of a recipe, and the parts of its loop."""

    def __init__(self, recipe: Recipe, trial: Trial) -> None:
        self._recipe, self._trial = recipe, trial
        middles: dict[str, list[nn.Module]] = {"dropout": [nn.Dropout(0.2)], "batchnorm": [nn.BatchNorm1d(16)]}
        self.net = mlp(1, WIDTH, 1, *middles.get(recipe["model"], []))
        self.model = ddp(self.net)
        self.optimizers = self._optimizers()
        self.scheduler = StepLR(self.optimizers[0], 3, 0.5) if recipe["scheduler"] != "none" else None
        averaged = AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]
        self.ema = averaged if recipe["ema"] != "none" else None
        scaled = recipe["scaler"] != "none"
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3, enabled=scaled)
        self._protect()

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        parameters = list(self.model.parameters())
        match self._recipe["optimizer"]:
            case "adamw":
                return [torch.optim.AdamW(parameters, lr=1e-2)]
            case "sgd":
                return [torch.optim.SGD(parameters, lr=5e-2, momentum=0.9)]
            case _:
                half = len(parameters) // 2
                return [torch.optim.AdamW(parameters[:half], lr=1e-2), torch.optim.SGD(parameters[half:], lr=5e-2)]

    def _protect(self) -> None:
        named = {"scheduler": self.scheduler, "ema": self.ema, "scaler": self.scaler}
        named["scaler"] = self.scaler if self._recipe["scaler"] != "none" else None
        left_out = self._recipe["protected"].removeprefix("no ")
        kept = {name: each for name, each in named.items() if each is not None and name != left_out}
        self._trial.session.protect(self.model, *self.optimizers, **kept)

    @property
    def result(self) -> dict[str, Any]:
        named = {"scheduler": self.scheduler, "ema": self.ema, "scaler": self.scaler, "score": self.score()}
        return {"model": self.net, "optimizers": self.optimizers, **{k: v for k, v in named.items() if v is not None}}

    def zero(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none="kept" not in self._recipe["zero"])

    def gradients(self, step: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Forward and backward, of one part or of two; the last part's loss."""
        parts = 1 if self._recipe["accumulation"] == "none" else 2
        for at, (some, wanted) in enumerate(zip(x.chunk(parts), y.chunk(parts), strict=True), 1):
            apart = self._recipe["accumulation"] == "no_sync" and at < parts
            with self.model.no_sync() if apart else contextlib.nullcontext():
                loss = mse(self.model(some), wanted) / parts
                if self._recipe["log"] == "early" and at == parts:
                    step.log(loss=loss)
                self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        return loss

    def update(self) -> None:
        clip = self._recipe["clip"]
        if self._recipe["scaler"] == "unscales" or clip != "none":
            for optimizer in self.optimizers:
                self.scaler.unscale_(optimizer)
        if clip == "norm":
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        if clip == "value":
            nn.utils.clip_grad_value_(self.model.parameters(), 0.1)
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()

    def follow(self, place: str) -> None:
        """Scheduler and average, where they are moved at this place."""
        if self.ema is not None and self._recipe["ema"] == place:
            self.ema.update_parameters(self.net)
        if self.scheduler is not None and self._recipe["scheduler"] == place:
            self.scheduler.step()

    def score(self) -> float:
        """The loss on other data, over all ranks."""
        self.net.eval()
        total = torch.zeros(1)
        with torch.no_grad():
            for part in range(2):
                x, y = batch(5_000 + 10 * part + self._trial.session.rank)
                total += mse(self.net(x), y)
                dist.all_reduce(total)
        self.net.train()
        return float(total)

    def look(self, x: torch.Tensor) -> None:
        """Run a forward of one rank alone: not in training mode, where it alone would change running statistics."""
        self.net.eval()
        with torch.no_grad():
            self.net(x)
        self.net.train()

    def loader(self) -> Any:
        if self._recipe["data"] == "function":
            return None
        inputs = torch.randn(96, WIDTH, generator=torch.Generator().manual_seed(3))
        return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True).sin()), batch_size=4, shuffle=True)


def train(recipe: Recipe, t: Trial) -> dict[str, Any]:
    """The loop."""
    it = Training(recipe, t)
    kind = recipe["evaluation"]
    supervised = isinstance(t.session, regrow.Session)
    evaluate = regrow.restartable(it.score) if kind == "marked" and supervised else it.score
    for step in t.steps(it.loader()):
        with step as (x, y):
            it.follow("first")
            if recipe["zero"] == "first":
                it.zero()
            loss = it.gradients(step, x, y)
            it.update()
            it.follow("in the body")
            if recipe["zero"] != "first":
                it.zero()
            if recipe["log"] == "late":
                step.log(loss=loss)
        if recipe["log"] == "behind":
            step.log(loss=loss)
        if step.committed:
            it.follow("behind, guarded")
        it.follow("behind")
        if step.number % EVERY == EVERY - 1:
            it.follow("behind each third")
            if kind == "marked":
                evaluate()
            if kind == "of the main rank" and t.session.is_main:
                it.look(x)
        if step.number % EVERY == 0 and kind == "not marked":
            evaluate()
    return it.result
