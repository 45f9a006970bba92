"""NVRx's in-process restart for `peers.py`: the training function restarts in the remaining processes.

Two more processes than ranks wait in reserve. `peers.py` starts each process itself, since torchrun ends all workers
when one is lost, as the tool's example notes.
"""

import os
from datetime import timedelta

import peer_training
import torch.distributed as dist
import workload
from nvidia_resiliency_ext import inprocess
from torch._C._distributed_c10d import TCPStore
from torch.nn.parallel import DistributedDataParallel

ARGS = peer_training.parse(__doc__)


@inprocess.Wrapper(  # type: ignore[untyped-decorator]
    store_kwargs={"port": int(os.environ["MASTER_PORT"]) + 1},
    rank_assignment=inprocess.Compose(
        inprocess.rank_assignment.MaxActiveWorldSize(workload.WORLD), inprocess.rank_assignment.FillGaps()
    ),
    monitor_thread_interval=timedelta(seconds=0.2),
    monitor_process_interval=timedelta(seconds=0.2),
    heartbeat_interval=timedelta(seconds=0.5),
    progress_watchdog_interval=timedelta(seconds=0.5),
    last_call_wait=timedelta(seconds=0.2),
    soft_timeout=timedelta(seconds=10),
    hard_timeout=timedelta(seconds=15),
    heartbeat_timeout=timedelta(seconds=10),
)
def train(call_wrapper: inprocess.CallWrapper | None = None) -> None:
    """Train until `--steps`."""
    assert call_wrapper is not None
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    port = int(os.environ["MASTER_PORT"]) + 2 + call_wrapper.iteration
    store = TCPStore(os.environ["MASTER_ADDR"], port, world, is_master=rank == 0, multi_tenant=True)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=10))
    model = workload.prepare()
    optimizer = workload.make_optimizer(model)
    first = peer_training.load(ARGS.folder, model, optimizer)
    replica = DistributedDataParallel(model)
    steps = peer_training.Steps(ARGS.folder, rank)
    for step in range(first, ARGS.steps):
        peer_training.loss_of(replica, step, rank).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        steps.finished(step)
        if ARGS.checkpoint_every and (step + 1) % ARGS.checkpoint_every == 0 and rank == 0:
            with call_wrapper.atomic():
                peer_training.save(ARGS.folder, step + 1, model, optimizer)
    if rank == 0:
        peer_training.finish(ARGS.folder, model)


if __name__ == "__main__":
    train()
