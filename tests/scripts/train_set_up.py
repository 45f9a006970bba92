"""A training whose ranks tell each other something before their loop, in the ways that `--calls` names.

What a newcomer would say itself is wrong: only what the first ranks have heard makes its losses theirs.
"""

import argparse
import json
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import regrow

parser = argparse.ArgumentParser()
parser.add_argument("--calls", default="broadcast")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--out", type=Path)
parser.add_argument("--pace", type=float, default=0.0)
parser.add_argument("--any-world", action="store_true")
parser.add_argument("--newcomers-skip", action="store_true")
parser.add_argument("--mebibytes", type=int, default=0)
parser.add_argument("--size", type=int, default=0)
args = parser.parse_args()

torch.set_num_threads(1)
session = regrow.init(seed=3)
RANK, WORLD = dist.get_rank(), dist.get_world_size()
LAST = WORLD - 1


def said(*shape: int) -> torch.Tensor:
    """This rank's word; a newcomer's is another one."""
    return torch.full(shape or (2,), RANK + 1.5 + 1000 * session.newcomer)


def broadcast() -> torch.Tensor:
    heard = said()
    dist.broadcast(heard, 0)
    return heard


def all_reduce() -> torch.Tensor:
    heard = said()
    dist.all_reduce(heard)
    return heard


def largest() -> torch.Tensor:
    heard = said()
    dist.all_reduce(heard, op=dist.ReduceOp.MAX)
    return heard


def all_gather() -> torch.Tensor:
    heard = [torch.zeros(2) for _ in range(WORLD)]
    dist.all_gather(heard, said())
    return torch.cat(heard)


def all_gather_into_tensor() -> torch.Tensor:
    heard = torch.zeros(2 * WORLD)
    dist.all_gather_into_tensor(heard, said())
    return heard


def all_gather_object() -> torch.Tensor:
    heard: list[dict[str, float]] = [{}] * WORLD
    dist.all_gather_object(heard, {"word": float(said()[0]), "x" * (RANK + 1): 1.0})
    return torch.tensor([each["word"] for each in heard])


def gather() -> torch.Tensor:
    heard = [torch.zeros(2) for _ in range(WORLD)] if RANK == LAST else None
    dist.gather(said(), heard, dst=LAST)
    return torch.cat(heard) if heard else torch.zeros(1)


def gather_object() -> torch.Tensor:
    heard: list[float] | None = [0.0] * WORLD if RANK == LAST else None
    dist.gather_object(float(said()[0]), heard, dst=LAST)
    return torch.tensor(heard or [0.0])


def scatter() -> torch.Tensor:
    heard = torch.zeros(2)
    dist.scatter(heard, [said() * (rank + 1) for rank in range(WORLD)] if RANK == 0 else None, src=0)
    return heard


def scatter_object_list() -> torch.Tensor:
    heard: list[float] = [0.0]
    dist.scatter_object_list(heard, [float(said()[0]) + rank for rank in range(WORLD)] if RANK == 0 else None, src=0)
    return torch.tensor(heard)


def reduce() -> torch.Tensor:
    heard = said()
    dist.reduce(heard, LAST)
    return heard if RANK == LAST else torch.zeros(1)


def reduce_scatter() -> torch.Tensor:
    heard = torch.zeros(2)
    dist.reduce_scatter(heard, [said() * rank for rank in range(WORLD)])
    return heard


def reduce_scatter_tensor() -> torch.Tensor:
    heard = torch.zeros(2)
    dist.reduce_scatter_tensor(heard, said(2 * WORLD))
    return heard


def all_to_all() -> torch.Tensor:
    heard = [torch.zeros(2) for _ in range(WORLD)]
    dist.all_to_all(heard, [said() * rank for rank in range(WORLD)])
    return torch.cat(heard)


def all_to_all_single() -> torch.Tensor:
    heard = torch.zeros(WORLD)
    dist.all_to_all_single(heard, said(WORLD))
    return heard


def broadcast_object_list() -> torch.Tensor:
    words = (
        [{"name": f"run of {said()[0]}", "words": list(range(50 * (RANK + 1)))}, "tail"] if RANK == 0 else [None] * 2
    )
    dist.broadcast_object_list(words, src=0)
    first = words[0]
    assert isinstance(first, dict) and words[1] == "tail"
    return torch.tensor([float(len(first["name"])), float(len(first["words"])), float(first["name"].split()[-1])])


def send_and_receive() -> torch.Tensor:
    heard = torch.zeros(2)
    work = dist.isend(said(), (RANK + 1) % WORLD)
    dist.recv(heard, (RANK - 1) % WORLD)
    assert work is not None
    work.wait()
    return heard


def receive_from_any() -> torch.Tensor:
    heard = torch.zeros(2)
    if RANK == 0:
        dist.send(said(), LAST)
    elif RANK == LAST:
        heard += dist.recv(heard)
    dist.barrier()  # else it may be what another sends next
    return heard


def batched() -> torch.Tensor:
    heard = torch.zeros(2)
    operations = [dist.P2POp(dist.isend, said(), (RANK + 1) % WORLD)]
    operations.append(dist.P2POp(dist.irecv, heard, (RANK - 1) % WORLD))
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return heard


def barriers() -> torch.Tensor:
    for _ in range(3 + 2 * session.newcomer):  # tells nothing: one more does no harm
        dist.barrier()
    whole: Any = dist.group.WORLD  # dist.monitored_barrier asks for gloo by name
    whole.monitored_barrier(timeout=timedelta(seconds=60))
    return torch.zeros(1)


def asynchronous() -> torch.Tensor:
    heard, more = said(), said()
    works = [dist.broadcast(heard, 0, async_op=True), dist.all_reduce(more, async_op=True)]
    for work in works:
        work.wait()
    answer = torch.cat([heard, more])
    heard.zero_()
    return answer


def coalesced() -> torch.Tensor:
    heard, more = said(), said()
    with dist.distributed_c10d._coalescing_manager():
        dist.all_reduce(heard)
        dist.all_reduce(more)
    return torch.cat([heard, more])


def groups() -> torch.Tensor:
    heard = said()
    pairs = [dist.new_group([2 * each, 2 * each + 1]) for each in range(WORLD // 2)]
    dropped = dist.new_group(list(range(WORLD)))
    dist.broadcast(heard, 0, group=dropped)
    dist.destroy_process_group(dropped)
    again = dist.new_group(list(range(WORLD)))
    more = said()
    dist.all_reduce(more, group=again)
    if len(pairs) > RANK // 2:
        dist.all_reduce(heard, group=pairs[RANK // 2])
    return heard + more


def mesh() -> torch.Tensor:
    heard = said()
    rows = init_device_mesh("cpu", (WORLD // 2, 2), mesh_dim_names=("a", "b"))
    dist.all_reduce(heard, group=rows.get_group("b"))
    dist.broadcast(heard, group=rows.get_group("a"), group_src=0)
    return heard


def functional() -> torch.Tensor:
    import torch.distributed._functional_collectives as collectives

    whole: Any = dist.group.WORLD
    summed: torch.Tensor = collectives.all_reduce(said(), "sum", whole)
    return summed + 0.0


def large() -> torch.Tensor:
    heard = said(args.mebibytes << 18)
    dist.broadcast(heard, 0)
    return heard[:2].clone()


def own_wrapper() -> torch.Tensor:
    for parameter in wide.parameters():
        dist.broadcast(parameter.data, 0)
    return torch.zeros(1)


wide = nn.Linear(args.size or 1, args.size or 1)
CALLS: dict[str, Callable[[], torch.Tensor]] = {
    each.__name__: each
    for each in (
        broadcast,
        all_reduce,
        largest,
        all_gather,
        all_gather_into_tensor,
        all_gather_object,
        gather,
        gather_object,
        scatter,
        scatter_object_list,
        reduce,
        reduce_scatter,
        reduce_scatter_tensor,
        all_to_all,
        all_to_all_single,
        broadcast_object_list,
        send_and_receive,
        receive_from_any,
        batched,
        barriers,
        asynchronous,
        coalesced,
        groups,
        mesh,
        functional,
        large,
        own_wrapper,
    )
}
names = args.calls.split(",")
if session.newcomer and args.newcomers_skip:
    names = names[1:]
heard = {name: CALLS[name]() for name in names}
shift = sum(float(answer.double().dot(torch.arange(1.0, answer.numel() + 1).double())) for answer in heard.values())
model = DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
session.protect(model, optimizer, wide=wide)


def batch(step: int) -> torch.Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(1000 * step + session.rank))


rows: Any = [torch.randn(4, generator=torch.Generator().manual_seed(row)) for row in range(120)]
loader: Any = regrow.DataLoader(rows, global_batch_size=12) if args.any_world else batch
for step in session.steps(loader, until=args.steps):
    with step as x:
        loss = model(x + shift / 1000).square().mean()
        step.log(loss=loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if args.pace and not step.rehearsal and not Path("hurry").exists():
            time.sleep(args.pace)
    if args.pace and session.is_main and step.committed:
        print(f"step {step.number}", flush=True)
if args.out is not None:
    report = {
        "digest": session.digest(),
        "rank": session.rank,
        "shift": shift,
        "heard": {name: str(answer) for name, answer in heard.items()},
    }
    args.out.with_suffix(f".{session.rank}.json").write_text(json.dumps(report))
