"""The torchrun side of `recovery.py`: plain DDP with a checkpoint every few steps, resumed after a restart.

Run by `torchrun`; every rank writes its commits to `steps.rank<R>.jsonl` in the format of regrow's agents.
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import workload
from torch.nn.parallel import DistributedDataParallel


def load(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the newest checkpoint, if there is one; returns the step to go on with."""
    if not path.exists():
        return 0
    checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    return int(checkpoint["step"])


def save(path: Path, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write a checkpoint atomically."""
    unfinished = path.with_suffix(".tmp")
    torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, unfinished)
    unfinished.replace(path)


def main() -> None:
    """Train until `--steps`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--dir", type=Path, required=True, help="for records and the checkpoint")
    parser.add_argument("--checkpoint-every", type=int, default=0, help="in steps; 0: never")
    args = parser.parse_args()
    dist.init_process_group("nccl" if workload.DEVICE.type == "cuda" else "gloo")
    rank, restart = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    model = workload.prepare()
    optimizer = workload.make_optimizer(model)
    checkpoint = args.dir / "checkpoint.pt"
    first = load(checkpoint, model, optimizer)
    replica = DistributedDataParallel(model)
    with (args.dir / f"steps.rank{rank}.jsonl").open("a", buffering=1) as records:
        for step in range(first, args.steps):
            start = time.monotonic()
            loss = workload.loss_of(replica, workload.make_batch(step, rank))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            known = loss.item()  # waits for the step's end on a GPU
            at = time.monotonic()
            record = {"type": "StepCommitted", "at": at, "step": step, "rank": rank, "worker": f"{restart}.{rank}"}
            metrics = {"loss": known, "pid": workload.own_pid()}
            record |= {"generation": restart, "seconds": at - start, "metrics": metrics}
            records.write(json.dumps(record) + "\n")
            if args.checkpoint_every and (step + 1) % args.checkpoint_every == 0 and rank == 0:
                save(checkpoint, step + 1, model, optimizer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
