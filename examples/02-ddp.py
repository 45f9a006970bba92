"""Trains a small GPT on the source of Python's standard library, and continues when workers die.

    regrow run --nproc-per-node 4 --standby 1 examples/02-ddp.py --steps 200

The same file also runs alone: `python examples/02-ddp.py`.
"""

import argparse
import json
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

import regrow
from gpt import GPT, PRESETS, ByteWindows, corpus

BATCH_SIZES = {"demo": 8, "bench": 1}


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--preset", choices=sorted(PRESETS), default="demo")
    parser.add_argument("--batch-size", type=int, help="windows of text a rank and step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--megabytes", type=float, default=4.0, help="how much text")
    parser.add_argument("--out", type=Path, help="where rank 0 writes the digest of the final state, as JSON")
    return parser.parse_args()


def main() -> None:
    """One training run."""
    args = arguments()
    torch.set_num_threads(1)
    config = PRESETS[args.preset]
    session = regrow.init(seed=args.seed)

    model = DDP(GPT(config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)
    session.protect(model, optimizer, scheduler)

    windows = ByteWindows(corpus(args.megabytes), config.block)
    batch_size = args.batch_size or BATCH_SIZES[args.preset]
    loader = DataLoader(windows, batch_size=batch_size, shuffle=True, drop_last=True)

    for step in session.steps(loader, until=args.steps):
        with step as batch:
            x, y = batch
            loss = model(x, y)
            step.log(loss=loss)  # staged with the step: the death of this worker does not lose it
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    if args.out is not None and session.is_main:
        receipt = {"steps": args.steps, "world": session.world_size, "state": session.digest()}
        args.out.write_text(json.dumps(receipt) + "\n")


if __name__ == "__main__":
    main()
