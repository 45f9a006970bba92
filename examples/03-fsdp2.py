"""Trains a small GPT whose parameters are sharded over all ranks (FSDP2), and continues when a rank dies.

    regrow run --local-nodes 2 --nproc-per-node 1 --buddy-every 1 examples/03-fsdp2.py
    regrow kill --rank 1                                   # in another terminal, as often as you like

Each shard exists once, so regrow keeps a copy of it in the memory of another node, taken every `--buddy-every` steps.
Replicas need no copies: see 04-hsdp.py. On GPUs the mesh is of "cuda", and
`torch.cuda.set_device(session.local_rank)` comes before it.
"""

import argparse

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import regrow
from gpt import GPT, PRESETS, ByteWindows, corpus


def main() -> None:
    """Train, and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    session = regrow.init(seed=0)  # regrow, instead of init_process_group

    config = PRESETS["demo"]
    model = GPT(config)
    mesh = init_device_mesh("cpu", (session.world_size,), mesh_dim_names=("dp_shard",))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    session.protect(model, optimizer)  # regrow

    loader = DataLoader(ByteWindows(corpus(1.0), config.block), batch_size=8, shuffle=True, drop_last=True)
    for step in session.steps(loader, until=args.steps):  # regrow
        with step as (x, y):  # regrow
            loss = model(x, y)
            step.log(loss=loss)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        if step.committed and session.is_main and step.number % 20 == 19:
            print(f"step {step.number + 1}: loss {float(loss.detach()):.3f}", flush=True)

    print(f"rank {session.rank}: {args.steps} steps, state {session.digest()}")


if __name__ == "__main__":
    main()
