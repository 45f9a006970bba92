"""Trains on samples that are slow to make: a node makes each batch once, ahead of training, for all its ranks.

    regrow run --nproc-per-node 2 --standby 1 examples/06-data.py
    regrow kill --rank 0                                   # in another terminal, as often as you like
    regrow data verify                                     # afterwards: every sample came exactly once

`regrow.DataLoader` takes torch's arguments. A rank that replaces a lost one has its batch in milliseconds, at any step,
as a process that outlives the workers makes them. With `global_batch_size` a step has the same samples in any world.
"""

import argparse

import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import Dataset

import regrow
from gpt import GPT, PRESETS, corpus

LENGTH = PRESETS["demo"].block + 1
"""One byte more than the model reads: the target of its last position."""


class Lines(Dataset[torch.Tensor]):
    """Lines of Python's own source, each as a fixed number of bytes; randomly indented, as a random transform."""

    def __init__(self) -> None:
        self.lines = [line for line in corpus(0.3).splitlines() if line.strip()]

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> torch.Tensor:
        indent = b" " * int(torch.randint(0, 8, ()))  # by the session's seed and the sample: the same in every process
        return torch.tensor(list((indent + self.lines[index].strip())[:LENGTH].ljust(LENGTH)))


def main() -> None:
    """Train, and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    session = regrow.init(seed=0)  # regrow, instead of init_process_group

    model = DDP(GPT(PRESETS["demo"]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    session.protect(model, optimizer)  # regrow

    loader = regrow.DataLoader(Lines(), global_batch_size=16, shuffle=True, num_workers=1)  # regrow, instead of torch's
    for step in session.steps(loader, until=args.steps):  # regrow
        with step as tokens:  # regrow
            loss = model(tokens[:, :-1], tokens[:, 1:])
            step.log(loss=loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if step.committed and session.is_main and step.number % 20 == 19:
            print(f"step {step.number + 1}: loss {float(loss.detach()):.3f}", flush=True)

    print(f"rank {session.rank}: {args.steps} steps, state {session.digest()}")


if __name__ == "__main__":
    main()
