"""Trains a small GPT whose parameters are sharded over two ranks, with a replica for each pair of ranks.

    regrow run --nproc-per-node 4 --standby 1 examples/04-hsdp.py
    regrow kill --rank 2                                   # in another terminal, as often as you like

A lost rank gets its shard from the rank of another replica that has the same one: no copies, no lost steps. On GPUs the
mesh is of "cuda", and `torch.cuda.set_device(session.local_rank)` comes before it.
"""

import argparse

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import regrow
from gpt import GPT, PRESETS, ByteWindows, corpus

SHARDS = 2


@regrow.restartable  # regrow: it has collectives (FSDP2's forward) and stands between two steps
def evaluate(model: GPT, held_out: ByteWindows) -> float:
    """The mean loss over held-out text; every rank computes the same value."""
    model.eval()
    with torch.no_grad():
        losses = [float(model(x[None], y[None])) for x, y in (held_out[at] for at in range(8))]
    model.train()
    return sum(losses) / len(losses)


def main() -> None:
    """Train, evaluate from time to time, and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=50, help="steps between two evaluations")
    args = parser.parse_args()
    session = regrow.init(seed=0)  # regrow, instead of init_process_group

    config = PRESETS["demo"]
    model = GPT(config)
    shape = (session.world_size // SHARDS, SHARDS)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard"))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    session.protect(model, optimizer)  # regrow

    text = corpus(1.0)
    loader = DataLoader(ByteWindows(text[:-4096], config.block), batch_size=8, shuffle=True, drop_last=True)
    for step in session.steps(loader, until=args.steps):  # regrow
        with step as (x, y):  # regrow
            loss = model(x, y)
            step.log(loss=loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if (step.number + 1) % args.every == 0:
            score = evaluate(model, ByteWindows(text[-4096:], config.block))
            if step.committed and session.is_main:
                print(f"step {step.number + 1}: loss {score:.3f} on text that it has not seen", flush=True)

    print(f"rank {session.rank}: {args.steps} steps, state {session.digest()}")


if __name__ == "__main__":
    main()
