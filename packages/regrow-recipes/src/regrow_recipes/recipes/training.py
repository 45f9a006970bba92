"""The training loop of the recipes, which every worker of the job runs, newcomers too."""

import math
import sys
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import regrow
from regrow.devices import accelerators
from regrow.train.session import Session
from regrow_recipes.recipes.building import build, half, model_config
from regrow_recipes.recipes.exporting import export, gathered
from regrow_recipes.recipes.losses import Batch, BatchLosses
from regrow_recipes.recipes.progress import Progress
from regrow_recipes.recipes.reference import Reference, fill
from regrow_recipes.recipes.rows import Rows, batch_of
from regrow_recipes.recipes.schema import OptimSection, Run

_FLOOR = 0.1
"""Final share of the peak learning rate in a cosine schedule."""


def train(run: Run) -> Session:
    """Train a recipe to its end; returns the session with the final state."""
    recipe = run.recipe
    session = regrow.init(seed=recipe.train.seed, invariant=recipe.elastic.invariant)
    device = _device(session)
    model = build(run, device, world=session.world_size, load=not session.newcomer)
    optimizer = torch.optim.AdamW(
        _groups(model, recipe.optim.weight_decay), lr=recipe.optim.lr, betas=recipe.optim.betas
    )
    schedule = LambdaLR(optimizer, partial(rate, optim=recipe.optim, steps=run.steps))
    work = _Work(run, session, model, device)
    session.protect(model, optimizer, schedule, *work.besides)
    session.policy(regrow.Policy(learning_rate=recipe.elastic.learning_rate))
    for step in session.steps(_loader(run.data, run.micro), until=run.steps, microbatches=run.microbatches):
        with step as micros:
            for micro in micros:
                loss, weight = work.loss(micro.batch)
                micro.log(loss=loss)
                micro.backward(loss, weight=weight)
            norm = nn.utils.clip_grad_norm_(_trained(model), recipe.optim.clip or math.inf)
            step.log(grad_norm=_plain(norm))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if step.committed:
            work.report(step.number, step.numbers(), optimizer)
        if step.committed and run.eval_data and _due(step.number, recipe.train.eval_every, run.steps):
            work.report_evaluated(step.number, evaluate(work))
        if step.committed and _due(step.number, recipe.output.every, run.steps):
            save(work)
    return session


def rate(step: int, *, optim: OptimSection, steps: int) -> float:
    """The learning rate of a step, as a share of the peak."""
    warmup = round(optim.warmup * steps)
    if step < warmup:
        return (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    match optim.schedule:
        case "cosine":
            return _FLOOR + (1 - _FLOOR) * 0.5 * (1 + math.cos(math.pi * done))
        case "linear":
            return 1.0 - done
        case "constant":
            return 1.0


class _Work:
    """Work beside the loop: losses, evaluation, export."""

    def __init__(self, run: Run, session: Session, model: nn.Module, device: torch.device) -> None:
        self.run, self.session, self.model = run, session, model
        self._losses = BatchLosses(run.recipe, model_config(run), device)
        self.device = device
        self.eval_rows = Rows(run.eval_data) if run.eval_data else None
        self._reference = self._said_before() if run.recipe.method == "dpo" and not run.recipe.adapts else None
        self._progress = Progress(
            steps=run.steps,
            tokens=run.tokens_per_step,
            flops=run.flops_per_token,
            every=run.recipe.train.log_every,
            device=accelerators.name_of(device),
            half=half(run.recipe, device),
            clock=time.monotonic,
            memory=accelerators.memory_peak(device),
        )

    def _said_before(self) -> Reference:
        """Run the model on all pairs before training; a newcomer receives the result from its peers."""
        rows = Rows(self.run.data)
        made = Reference(len(rows), len(self.eval_rows or ()), self.device)
        if not self.session.newcomer:
            fill(made.trained, self._losses, self.model, rows)
            if self.eval_rows is not None:
                fill(made.evaluated, self._losses, self.model, self.eval_rows)
        return made

    @property
    def besides(self) -> list[nn.Module]:
        """Modules to protect in addition to the model."""
        return [] if self._reference is None else [self._reference]

    def loss(self, batch: Batch, *, evaluated: bool = False) -> tuple[torch.Tensor, int]:
        """The loss of a batch of training rows, or of evaluation rows, and its number of elements."""
        known = self._reference
        before = None if known is None else known.evaluated if evaluated else known.trained
        return self._losses(self.model, batch, before)

    def report(self, number: int, numbers: dict[str, float], optimizer: torch.optim.Optimizer) -> None:
        """Print the line of a step, on rank 0 only."""
        lr = optimizer.param_groups[0]["lr"]
        line = self._progress.line(number, numbers, lr=lr, world=self.session.world_size)
        if line and self.session.is_main:
            say(line)

    def report_evaluated(self, number: int, loss: float) -> None:
        """Print the line of an evaluation once, even if the evaluation was run again."""
        if self.session.is_main:
            say(f"after step {number + 1}: eval loss {loss:.4g}")


@regrow.restartable
def evaluate(work: _Work) -> float:
    """The mean loss over the evaluation rows, divided equally among the ranks."""
    rows, session = work.eval_rows, work.session
    if rows is None:
        return math.nan
    place, world = session.rank, session.world_size
    total, weights = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    work.model.eval()
    try:
        with torch.no_grad():
            for turn in range(math.ceil(len(rows) / world)):
                at = turn * world + place
                loss, weight = work.loss(batch_of([rows[at % len(rows)]]), evaluated=True)
                if at < len(rows):
                    total += loss.double().cpu() * weight
                    weights += weight
    finally:
        work.model.train()
    sums = torch.stack([total, weights]).to(work.device)
    if world > 1:
        dist.all_reduce(sums)
    return float(sums[0] / sums[1])


@regrow.restartable
def save(work: _Work) -> None:
    """Write the result that rank 0 has gathered."""
    weights = gathered(work.run, work.model)
    if work.session.is_main:
        for folder in export(work.run, work.model, weights, Path(work.run.recipe.output.dir)):
            say(f"written: {folder}")


def say(line: str) -> None:
    """Print a line and flush it."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _due(number: int, every: int, steps: int) -> bool:
    return number + 1 == steps or (every > 0 and (number + 1) % every == 0)


def _device(session: Session) -> torch.device:
    return accelerators.choose(session.local_rank)


def _loader(folder: str, micro: int) -> DataLoader[dict[str, torch.Tensor]]:
    return DataLoader(Rows(folder), batch_size=micro, shuffle=True, collate_fn=batch_of)


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _groups(model: nn.Module, decay: float) -> Iterable[dict[str, Any]]:
    """Parameter groups for weight decay: matrices decay, vectors do not."""
    trained = _trained(model)
    matrices, vectors = [p for p in trained if p.ndim > 1], [p for p in trained if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _plain(norm: torch.Tensor) -> torch.Tensor:
    whole = getattr(norm, "full_tensor", None)
    return norm if whole is None else whole()
