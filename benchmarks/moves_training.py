"""The training of `moves.py` and `endurance.py`: a state of any size, every element of which changes in every step.

The loss is a mean over all parameters, so every element has a gradient, and AdamW changes it and its two moments. A
step lasts at least `--pace` seconds, and longer towards the end, until there is a file `--hurry`, so that the training
still runs when the ranks move. At its end each rank writes a digest of its parameters and moments.
"""

import argparse
import hashlib
import json
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import regrow

CHUNK = 1_000_000
BYTES_AN_ELEMENT = 12
"""Bytes of a parameter and two moments."""
LONGEST_S = 2.0


class Spread(nn.Module):
    """A model with as many parameters as fit a state of `state_bytes`."""

    def __init__(self, state_bytes: float) -> None:
        super().__init__()
        left, chunks = max(1, int(state_bytes / BYTES_AN_ELEMENT)), []
        while left:
            chunks.append(nn.Parameter(torch.randn(min(CHUNK, left))))
            left -= len(chunks[-1])
        self.chunks = nn.ParameterList(chunks)

    def forward(self, batch: Tensor) -> Tensor:
        """A scalar that depends on all parameters and the batch."""
        return torch.stack(
            [(chunk * scale).sin().mean() for chunk, scale in zip(self.chunks, batch, strict=False)]
        ).mean()


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Digest of all bits of parameters and moments."""
    total = hashlib.sha256()
    for tensor in model.state_dict().values():
        total.update(tensor.numpy())
    for _, moments in sorted(optimizer.state_dict()["state"].items()):
        for name in ("exp_avg", "exp_avg_sq"):
            total.update(moments[name].numpy())
    return total.hexdigest()


def sleep_of(pace: float, step: int, steps: int) -> float:
    """Seconds that a step sleeps."""
    return min(LONGEST_S, pace * steps / max(1, steps - step))


def wait(pace: float, hurry: Path, step: int, steps: int) -> None:
    """Sleep for the duration of the step, unless the file `hurry` exists."""
    if pace and not hurry.exists():
        time.sleep(sleep_of(pace, step, steps))


def main() -> None:
    """Train until `--steps`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--state-mb", type=float, required=True)
    parser.add_argument("--pace", type=float, default=0.0)
    parser.add_argument("--hurry", type=Path, default=Path("hurry"))
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    session = regrow.init()
    torch.manual_seed(7)
    plain = Spread(args.state_mb * 1e6)
    model, optimizer = DistributedDataParallel(plain), torch.optim.AdamW(plain.parameters(), lr=1e-3)
    session.protect(model, optimizer)
    count = len(plain.chunks)

    def batch_of(step: int) -> Tensor:
        return torch.randn(count, generator=torch.Generator().manual_seed(step * 1024 + session.rank))

    for step in session.steps(batch_of, until=args.steps):
        with step as batch:
            if not step.rehearsal:
                wait(args.pace, args.hurry, step.number, args.steps)
            loss = model(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss=loss)
    told = {"digest": digest(plain, optimizer)}
    args.out.with_suffix(f".{session.rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
