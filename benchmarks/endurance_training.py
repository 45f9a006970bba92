"""The training of `endurance.py`: a small model in micro-batches, bitwise the same in any world.

With `--hold FOLDER` a step lasts a second while the previous incident continues: until the folder has a file named by
the incident's number. At its end rank 0 writes a digest of parameters and moments.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from moves_training import digest
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import regrow

WIDTH, SAMPLES, MICROBATCHES = 32, 4, 4


def batch_of(step: int, share: int) -> Tensor:
    """`[samples, width]` of a micro-batch of a step: a function of both."""
    return torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(step * 1024 + share))


def hold(folder: Path | None, number: int) -> None:
    """Slow steps down during an incident: all ranks wait, so that no rank is taken for a hung one."""
    if folder is not None and not (folder / str(number)).exists():
        time.sleep(1.0)


def main() -> None:
    """Train until `--steps`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--hold", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    session = regrow.init(invariant=True)
    torch.manual_seed(7)
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 1))
    model, optimizer = DistributedDataParallel(plain), torch.optim.AdamW(plain.parameters(), lr=1e-3)
    session.protect(model, optimizer)
    for step in session.steps(batch_of, until=args.steps, microbatches=MICROBATCHES):
        with step as microbatches:
            if not step.rehearsal:
                hold(args.hold, step.number // args.every)
            for micro in microbatches:
                loss = mse_loss(model(micro.batch), micro.batch.sum(1, keepdim=True).sin())
                micro.log(loss=loss)
                micro.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    if session.rank == 0:
        args.out.write_text(json.dumps({"digest": digest(plain, optimizer)}))


if __name__ == "__main__":
    main()
