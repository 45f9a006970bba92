"""Plain DDP for `peers.py`, with checkpoints: under torchrun or NVRx's `ft_launcher`, to which it sends heartbeats."""

import os
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import peer_training
import torch.distributed as dist
import workload
from torch.nn.parallel import DistributedDataParallel


def heart() -> Any:
    """NVRx's client if its launcher has started this process, else one that does nothing."""
    if "FT_RANK_MONITOR_IPC_SOCKET" not in os.environ:
        return SimpleNamespace(send_heartbeat=lambda: None, shutdown_workload_monitoring=lambda: None)
    from nvidia_resiliency_ext import fault_tolerance

    client = fault_tolerance.RankMonitorClient()
    client.init_workload_monitoring()
    return client


def main() -> None:
    """Train until `--steps`."""
    args = peer_training.parse(__doc__)
    dist.init_process_group("gloo", timeout=timedelta(seconds=10))
    client, rank = heart(), dist.get_rank()
    model = workload.prepare()
    optimizer = workload.make_optimizer(model)
    first = peer_training.load(args.folder, model, optimizer)
    replica = DistributedDataParallel(model)
    steps = peer_training.Steps(args.folder, rank)
    for step in range(first, args.steps):
        peer_training.loss_of(replica, step, rank).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        client.send_heartbeat()
        steps.finished(step)
        if args.checkpoint_every and (step + 1) % args.checkpoint_every == 0 and rank == 0:
            peer_training.save(args.folder, step + 1, model, optimizer)
    if rank == 0:
        peer_training.finish(args.folder, model)
    client.shutdown_workload_monitoring()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
