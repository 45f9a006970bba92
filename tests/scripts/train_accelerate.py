"""A small training by Hugging Face's `Accelerator`, with an evaluation between its steps."""

import argparse
import json
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import regrow
from regrow_recipes.adapters.accelerate import Accelerator

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--out", type=Path)
parser.add_argument("--one-batch", action="store_true", help="a step is that of one batch, as docs/adopt.md has it")
options = parser.parse_args()

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, seed=3)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
inputs = torch.randn(96, 16, generator=torch.Generator().manual_seed(5))
targets = inputs.sum(1, keepdim=True).sin()
loader = DataLoader(TensorDataset(inputs, targets), batch_size=4, shuffle=True)
history: list[float] = []


@regrow.restartable
def evaluate() -> float:
    """The mean of all ranks' losses on parts of their own."""
    model.eval()
    rank, world = accelerator.process_index, accelerator.num_processes
    with torch.no_grad():
        loss = nn.functional.mse_loss(accelerator.unwrap_model(model)(inputs[rank::world]), targets[rank::world])
    model.train()
    return float(accelerator.gather(loss).mean())


if options.one_batch:
    accelerator = Accelerator(cpu=True, seed=3)
    held_out = DataLoader(TensorDataset(inputs[:22], targets[:22]), batch_size=4)
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=8, shuffle=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps * accelerator.num_processes)
    model, optimizer, loader, held_out, scheduler = accelerator.prepare(model, optimizer, loader, held_out, scheduler)
    for step in accelerator.steps(loader, epochs=options.steps // 4):
        model.train()
        with step as (x, y):
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if not accelerator.ends_epoch(step):
            continue
        model.eval()
        seen, total = 0, 0.0
        for x, y in held_out:
            with torch.no_grad():
                found = model(x)
            found, references = accelerator.gather_for_metrics((found, y))
            seen += len(found)
            total += float((found - references).square().sum())
        assert seen == 22
        history += [total / seen, accelerator.epoch]
else:
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for step in accelerator.steps(loader, epochs=options.steps // 4):
        with step as micros:
            for x, y in accelerator.batches(micros):
                accelerator.backward(nn.functional.mse_loss(model(x), y))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if step.committed and accelerator.ends_epoch(step):
            history.append(evaluate())

rank = accelerator.process_index
report = {
    "digest": accelerator.session.digest(),
    "history": history,
    "rank": rank,
    "main": accelerator.is_main_process,
    "state": [accelerator.state.process_index, accelerator.state.num_processes],
}
options.out.with_suffix(f".{rank}.json").write_text(json.dumps(report))
