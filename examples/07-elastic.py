"""Trains a small GPT in a world that grows and shrinks during the training.

    regrow run --nproc-per-node 1 --replicas 1:4 examples/07-elastic.py

In another terminal, as often as you like, and at the end:

    regrow scale --replicas 4
    regrow scale --replicas 2
    regrow plot

The global batch of a step is 8 micro-batches in any world, so the loss curve continues without a break; with
`--invariant` it is bitwise the same for any world. The file also runs alone: `python examples/07-elastic.py`.

Lines that a plain PyTorch loop with gradient accumulation would not have are marked with `# regrow`.
"""

import argparse
import json
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

import regrow
from gpt import GPT, PRESETS, ByteWindows, corpus


def main() -> None:
    """One training run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--microbatches", type=int, default=8, help="of a step, whatever the world")
    parser.add_argument("--batch-size", type=int, default=4, help="windows of text a micro-batch")
    parser.add_argument("--invariant", action="store_true", help="bitwise the same for any world")
    parser.add_argument("--megabytes", type=float, default=4.0, help="how much text")
    parser.add_argument("--out", type=Path, help="where rank 0 writes the digest of the final state, as JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    config = PRESETS["demo"]
    session = regrow.init(seed=0, invariant=args.invariant)  # regrow

    model = DDP(GPT(config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    session.protect(model, optimizer)  # regrow

    def told(event: regrow.ScaleEvent) -> None:
        if session.is_main and not event.leaving:
            print(f"{event.kind}: {event.before} replicas before, {event.after} now ({event.reason})", flush=True)

    session.on_scale(told)

    windows = ByteWindows(corpus(args.megabytes), config.block)
    loader = DataLoader(windows, batch_size=args.batch_size, shuffle=True, drop_last=True)

    for step in session.steps(loader, until=args.steps, microbatches=args.microbatches):  # regrow
        with step as microbatches:  # regrow
            step.log(tokens=len(microbatches) * args.batch_size * config.block)  # this rank's
            for micro in microbatches:
                x, y = micro.batch
                loss = model(x, y)
                micro.log(loss=loss)
                micro.backward(loss)  # regrow, instead of loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if step.committed and session.is_main and step.number % 50 == 0:
            print(f"step {step.number}: loss {step.numbers()['loss']:.3f}", flush=True)

    if args.out is not None and session.is_main:
        receipt = {"steps": args.steps, "world": session.world_size, "state": session.digest()}
        args.out.write_text(json.dumps(receipt) + "\n")


if __name__ == "__main__":
    main()
