"""The training of `short_jobs.py`: a linear layer by DDP, under any launcher or alone, with regrow or not.

Each rank appends `rank pid word seconds` to `--marks`: after its first step, and at its end. Seconds are those of the
system clock, since the epoch. Rank 0 writes the weights to `--out`.
"""

import argparse
import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FAST = 3
"""Steps before the job waits for permission to train at full speed."""


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--marks", type=Path, required=True)
    parser.add_argument("--out", type=Path, help="weights")
    parser.add_argument("--plain", action="store_true", help="without regrow")
    parser.add_argument("--hurry", type=Path, help="until this file is there, a step lasts a second")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    last: list[nn.Parameter] = []
    for step, rank, last in plain_steps(args) if args.plain else regrow_steps(args):  # noqa: B007  the last ones
        if step == 0:
            mark(args.marks, rank, "step1")
    mark(args.marks, rank, "end")
    if rank == 0 and args.out is not None:
        args.out.write_text(repr([each.tolist() for each in last]))


def mark(marks: Path, rank: int, word: str) -> None:
    """Append a line in one write, since others write to the file too."""
    with marks.open("a") as file:
        file.write(f"{rank} {os.getpid()} {word} {time.time():.6f}\n")


def wait(args: argparse.Namespace, step: int) -> None:
    """Make a step last a second while the job is held."""
    until = time.monotonic() + 1.0
    while args.hurry is not None and step >= FAST and not args.hurry.exists() and time.monotonic() < until:
        time.sleep(0.02)


def batch_of(step: int, rank: int) -> torch.Tensor:
    """Two samples for a rank, `[2, 8]`."""
    return torch.randn(2, 8, generator=torch.Generator().manual_seed(1_000 * step + rank))


def regrow_steps(args: argparse.Namespace) -> Iterator[tuple[int, int, list[nn.Parameter]]]:
    """Steps under `regrow run`, or with regrow in a single process: number, rank, parameters."""
    import regrow

    session = regrow.init(seed=0)
    model = DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    session.protect(model, optimizer)
    for step in session.steps(lambda number: batch_of(number, session.rank), until=args.steps):
        with step as batch:
            wait(args, step.number)
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if step.committed:
            yield step.number, session.rank, list(model.parameters())


def plain_steps(args: argparse.Namespace) -> Iterator[tuple[int, int, list[nn.Parameter]]]:
    """The same without regrow, over gloo if there are several ranks."""
    several = "RANK" in os.environ
    model: nn.Module = nn.Linear(8, 1)
    rank = 0
    if several:
        torch.distributed.init_process_group("gloo")
        rank, model = torch.distributed.get_rank(), DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(args.steps):
        model(batch_of(step, rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        yield step, rank, list(model.parameters())
    if several:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
