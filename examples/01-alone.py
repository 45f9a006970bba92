"""Trains a small network in one process. Lines that a plain PyTorch script would not have are marked with `# regrow`.

    python examples/01-alone.py
    regrow run --nproc-per-node 1 --checkpoint-dir checkpoints --checkpoint-every 1s examples/01-alone.py

No other process holds the state of a single one: after `regrow kill --rank 0`, in another terminal, it continues from
its last checkpoint. With two ranks or more, recovery reads nothing from disk: see 02-ddp.py.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import regrow


def data(samples: int = 4096) -> TensorDataset:
    """Points, and a function of them to learn."""
    inputs = torch.randn(samples, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())


def main() -> None:
    """Train, and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    args = parser.parse_args()
    session = regrow.init(seed=0)  # regrow

    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.MSELoss()
    session.protect(model, optimizer)  # regrow

    loader = DataLoader(data(), batch_size=32, shuffle=True)
    for step in session.steps(loader, until=args.steps):  # regrow, instead of `for x, y in loader`
        with step as (x, y):  # regrow
            loss = criterion(model(x), y)
            step.log(loss=loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if step.committed and step.number % 100 == 99:
            print(f"step {step.number + 1}: loss {float(loss.detach()):.4f}", flush=True)

    print(f"rank {session.rank}: {args.steps} steps, state {session.digest()}")


if __name__ == "__main__":
    main()
