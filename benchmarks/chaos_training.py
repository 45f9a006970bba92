"""The training of `chaos.py`: a small model with steps of a given duration, under torchrun or regrow.

A step computes little, so that many ranks on few cores keep the pace, and a fault costs only its recovery. At the end
rank 0 writes a digest of the parameters and the optimizer's state.
"""

import argparse
import hashlib
import json
import os
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

SEED = 1234
IN, WIDTH, SAMPLES = 32, 64, 4


def build() -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    """The initial model, the same on every rank, and its optimizer."""
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    net = nn.Sequential(nn.Linear(IN, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 1))
    model = DistributedDataParallel(net)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def batch_of(step: int, rank: int) -> Tensor:
    """`[samples, in]` for a rank at a step: a function of both."""
    return torch.randn(SAMPLES, IN, generator=torch.Generator().manual_seed(SEED + step * 1024 + rank))


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor, pace: float) -> Tensor:
    """Run one step that sleeps `pace` seconds in addition; returns its loss."""
    time.sleep(pace)
    loss = nn.functional.mse_loss(model(batch), batch.sum(1, keepdim=True).sin())
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Digest of all bits of parameters and moments."""
    total = hashlib.sha256()
    for tensor in model.state_dict().values():
        total.update(tensor.numpy().tobytes())
    for _, moments in sorted(optimizer.state_dict()["state"].items()):
        for name in ("exp_avg", "exp_avg_sq"):
            total.update(moments[name].numpy().tobytes())
    return total.hexdigest()


def under_regrow(args: argparse.Namespace) -> tuple[int, str]:
    """Train with each step as a transaction. Returns rank and digest."""
    import regrow

    session = regrow.init()
    model, optimizer = build()
    session.protect(model, optimizer)
    for step in session.steps(lambda number: batch_of(number, session.rank), until=args.steps):
        with step as batch:
            loss = learn(model, optimizer, batch, 0.0 if step.rehearsal else args.pace)
            step.log(loss=loss, pid=float(os.getpid()))
    return session.rank, digest(model, optimizer)


def under_torchrun(args: argparse.Namespace) -> tuple[int, str]:
    """Train with plain DDP, resumed from its newest checkpoint. Returns rank and digest."""
    # Time limit of a collective with a lost rank; the default is half an hour.
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    rank = dist.get_rank()
    model, optimizer = build()
    checkpoint, first = args.records / "checkpoint.pt", 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = int(saved["step"])
    # Torchrun restarts its count on a new host, so the time identifies generations.
    generation = int(time.monotonic())
    with (args.records / f"steps.rank{rank}.jsonl").open("a", buffering=1) as records:
        for step in range(first, args.steps):
            began = time.monotonic()
            loss = learn(model, optimizer, batch_of(step, rank), args.pace).item()
            at = time.monotonic()
            line = {"type": "StepCommitted", "at": at, "step": step, "rank": rank, "worker": f"{generation}.{rank}"}
            metrics = {"loss": loss, "pid": float(os.getpid())}
            records.write(
                json.dumps(line | {"generation": generation, "seconds": at - began, "metrics": metrics}) + "\n"
            )
            if (step + 1) % args.checkpoint_every == 0 and rank == 0:
                unfinished = checkpoint.with_suffix(".tmp")
                state = {"step": step + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state, unfinished)
                unfinished.replace(checkpoint)
    made = digest(model, optimizer)
    dist.destroy_process_group()
    return rank, made


def main() -> None:
    """Train until `--steps`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", choices=["regrow", "torchrun"], required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--pace", type=float, required=True, help="seconds that a step sleeps")
    parser.add_argument(
        "--records", type=Path, required=True, help="for the digest, and torchrun's records and checkpoint"
    )
    parser.add_argument("--checkpoint-every", type=int, default=50, help="in steps; torchrun's side alone")
    args = parser.parse_args()
    rank, made = under_regrow(args) if args.side == "regrow" else under_torchrun(args)
    if rank == 0:
        (args.records / "digest").write_text(made)


if __name__ == "__main__":
    main()
