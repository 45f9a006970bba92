"""Models of recipes are loaded into the shards of a world, gathered, and written as after a training of no step."""

import argparse
from pathlib import Path

import msgspec
import torch

import regrow
from regrow_recipes.recipes.building import build
from regrow_recipes.recipes.exporting import export, gathered
from regrow_recipes.recipes.schema import Run

parser = argparse.ArgumentParser()
parser.add_argument("--runs", type=Path, required=True)
options = parser.parse_args()

session = regrow.init(seed=3)
for run in msgspec.json.decode(options.runs.read_bytes(), type=list[Run]):
    model = build(run, torch.device("cpu"), world=session.world_size, load=True)
    if run.recipe.adapts:
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:  # half of an adapter's matrices begin as zeros
                    parameter.mul_(0.5).add_(0.02)
    weights = gathered(run, model)
    if session.is_main:
        export(run, model, weights, Path(run.recipe.output.dir))
        torch.save({name: tensor for name, tensor in weights.items() if "lora_" in name}, f"{run.recipe.output.dir}.pt")
