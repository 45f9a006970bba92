"""The plain side of `recipes.py`: the training of a recipe as a loop of plain PyTorch under torchrun, without regrow.

Model, rows, loss and printed lines are the recipe's; the wrapper is DDP, the group gloo's. Every rank writes its steps
to `steps.rank<R>.jsonl` in the format of regrow's agents.
"""

import argparse
import json
import os
import time
from contextlib import nullcontext
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForCausalLM

from regrow_recipes.recipes.building import model_config, with_adapter
from regrow_recipes.recipes.losses import BatchLosses
from regrow_recipes.recipes.progress import Progress
from regrow_recipes.recipes.rows import Rows, batch_of
from regrow_recipes.recipes.schema import Run
from regrow_recipes.recipes.training import rate

CPU = torch.device("cpu")


def model_of(run: Run, config: Any) -> nn.Module:
    """As the recipe has it, loaded by every rank."""
    path = run.recipe.model.path
    model = AutoModelForCausalLM.from_pretrained(path, config=config, dtype=torch.float32, local_files_only=True)
    if run.recipe.adapts:
        model = with_adapter(run, model)
    model.train()
    return model  # type: ignore[no-any-return]


def main() -> None:
    """Train until it is ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--told", type=Path, required=True, help="what `regrow train` wrote")
    parser.add_argument("--dir", type=Path, required=True, help="for records")
    args = parser.parse_args()
    run = msgspec.json.decode(args.told.read_bytes(), type=Run)
    optim = run.recipe.optim
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(run.recipe.train.seed)
    config = model_config(run)
    model = DistributedDataParallel(model_of(run, config))
    losses = BatchLosses(run.recipe, config, CPU)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay)
    schedule = LambdaLR(optimizer, partial(rate, optim=optim, steps=run.steps))
    rows = Rows(run.data)
    sampler: DistributedSampler[Any] = DistributedSampler(rows, drop_last=True)
    loader = DataLoader(rows, batch_size=run.micro, sampler=sampler, collate_fn=batch_of, drop_last=True)
    batches = (batch for epoch in count() for batch in (sampler.set_epoch(epoch), loader)[1])  # type: ignore[func-returns-value]
    progress = Progress(
        steps=run.steps,
        tokens=run.tokens_per_step,
        flops=run.flops_per_token,
        every=run.recipe.train.log_every,
        device="",
        half=False,
        clock=time.monotonic,
    )
    mine = run.microbatches // world
    with (args.dir / f"steps.rank{rank}.jsonl").open("a", buffering=1) as records:
        for step in range(run.steps):
            start, told = time.monotonic(), torch.zeros(())
            for number in range(mine):
                with nullcontext() if number + 1 == mine else model.no_sync():
                    loss, _ = losses(model, next(batches))
                    told += loss.detach() / mine
                    (loss / mine).backward()  # type: ignore[no-untyped-call]
            norm = nn.utils.clip_grad_norm_(trained, optim.clip)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            numbers = {"loss": told.item(), "grad_norm": norm.item()}
            at = time.monotonic()
            record = {"type": "StepCommitted", "at": at, "step": step, "rank": rank, "worker": f"0.{rank}"}
            record |= {"generation": 0, "seconds": at - start, "metrics": numbers | {"pid": float(os.getpid())}}
            records.write(json.dumps(record) + "\n")
            line = progress.line(step, numbers, lr=optimizer.param_groups[0]["lr"], world=world)
            if line and rank == 0:
                print(line, flush=True)


if __name__ == "__main__":
    main()
