"""A small model that trains in DDP or HSDP: standard PyTorch, regrow's few lines, and points for faults."""

import argparse
import json
import os
import signal
import time
from pathlib import Path

import psutil
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import regrow

WIDTH, BATCH = 48, 8
SHARDS = 2
PATIENCE_S = 120.0
parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--mode", choices=["ddp", "hsdp"], default="ddp")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--die-once", metavar="FILE", help="rank 1 is killed before its loop, unless the file is there")
parser.add_argument("--hold", metavar="STEP:FILE", help="the last rank writes its process's id to FILE, and waits")
parser.add_argument("--count", metavar="FILE", help="rank 0 adds its descriptors and threads behind each step")
parser.add_argument("--assert-once", metavar="STEP:FILE", help="rank 1's device fails for good, unless FILE is there")
parser.add_argument("--fill", type=float, default=0.0, help="share of its device's free memory that rank 1 takes")


def place(local_rank: int) -> torch.device:
    """The device of this rank; ranks share devices if there are fewer devices than ranks."""
    torch.set_num_threads(1)
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.accelerator.set_device_index(local_rank % torch.accelerator.device_count())
    kind = torch.accelerator.current_accelerator()
    return torch.device(kind.type if kind is not None else "cpu", torch.accelerator.current_device_index())


def build(mode: str, device: torch.device) -> nn.Module:
    """The model on this rank's device. Its hidden width is odd, for uneven shards."""
    model = nn.Sequential(
        nn.Linear(WIDTH, 99), nn.GELU(), nn.Dropout(0.1), nn.Linear(99, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1)
    ).to(device)
    if mode == "ddp":
        return DistributedDataParallel(model, bucket_cap_mb=0.01)  # makes several reductions in a step
    shape = (torch.distributed.get_world_size() // SHARDS, SHARDS)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("dp_replicate", "dp_shard"))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def wait_for(path: Path) -> None:
    """Write this process's pid to `path`, then wait until the file with suffix `.go` exists."""
    path.with_suffix(".new").write_text(str(os.getpid()))
    path.with_suffix(".new").rename(path)
    until = time.monotonic() + PATIENCE_S
    while not path.with_suffix(".go").exists() and time.monotonic() < until:
        time.sleep(0.005)


def main() -> None:
    """Train the model as the arguments say."""
    args = parser.parse_args()
    session = regrow.init(seed=7)
    device = place(session.local_rank)
    model = build(args.mode, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session.protect(model, optimizer)
    if args.die_once and session.rank == 1 and not Path(args.die_once).exists():
        Path(args.die_once).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    filling = None
    if args.fill and session.rank == 1 and device.type != "cpu":
        free, _ = torch.get_device_module(device.type).mem_get_info()
        filling = torch.empty(int(free * args.fill), dtype=torch.uint8, device=device)
    hold_at, _, hold = (args.hold or "").partition(":")
    assert_at, _, broken = (args.assert_once or "").partition(":")

    def batch(number: int) -> torch.Tensor:
        source = torch.Generator().manual_seed(1000 * number + session.rank)
        return torch.randn(BATCH, WIDTH, generator=source)

    for step in session.steps(batch, until=args.steps):
        with step as x:
            if not step.rehearsal and hold_at == str(step.number) and session.rank == session.world_size - 1:
                wait_for(Path(hold))
            loss = (model(x.to(device)) - 1).square().mean()
            if not step.rehearsal and assert_at == str(step.number) and session.rank == 1 and not Path(broken).exists():
                Path(broken).touch()
                torch.ones(4, device=device)[torch.full((1,), 9, device=device)].sum().item()
            step.log(loss=loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if args.count and step.committed and session.is_main:
            me = psutil.Process()
            line = json.dumps({"step": step.number, "descriptors": me.num_fds(), "threads": me.num_threads()})
            with Path(args.count).open("a") as file:
                file.write(line + "\n")
    del filling


if __name__ == "__main__":
    main()
