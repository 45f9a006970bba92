"""The torchrun side of `elastic.py`: DDP in micro-batches with a checkpoint every few steps, for one agent or two.

Run by `torchrun --nnodes 1:2`; every rank writes its commits to `steps.rank<R>.jsonl` in the format of regrow's
agents, with the size of the world as the generation.
"""

import argparse
import json
import time
from contextlib import nullcontext
from pathlib import Path

import torch.distributed as dist
import workload
from ddp_torchrun import load, save
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    """Train until `--steps`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--dir", type=Path, required=True, help="for records and the checkpoint")
    parser.add_argument("--checkpoint-every", type=int, required=True, help="in steps")
    parser.add_argument("--microbatches", type=int, required=True, help="of a step, of all ranks together")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = workload.prepare()
    optimizer = workload.make_optimizer(model)
    checkpoint = args.dir / "checkpoint.pt"
    first = load(checkpoint, model, optimizer)
    replica = DistributedDataParallel(model)
    mine = range(rank, args.microbatches, world)
    with (args.dir / f"steps.rank{rank}.jsonl").open("a", buffering=1) as records:
        for step in range(first, args.steps):
            start, losses = time.monotonic(), []
            for share in mine:
                with nullcontext() if share == mine[-1] else replica.no_sync():
                    loss = workload.loss_of(replica, workload.make_batch(step, share)) / len(mine)
                    loss.backward()  # type: ignore[no-untyped-call]
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
            at = time.monotonic()
            record = {"type": "StepCommitted", "at": at, "step": step, "rank": rank, "worker": f"{world}.{rank}"}
            metrics = {"loss": sum(losses), "pid": workload.own_pid()}
            record |= {"generation": world, "seconds": at - start, "metrics": metrics}
            records.write(json.dumps(record) + "\n")
            if (step + 1) % args.checkpoint_every == 0 and rank == 0:
                save(checkpoint, step + 1, model, optimizer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
