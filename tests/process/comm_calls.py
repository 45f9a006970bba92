"""Calls of `torch.distributed` by scripts and parallelisms, on groups that are made once and then used again."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from tests.process.comm_cases import data
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

WORLD = 4
SIZE = 5
"""Rows, so that shards over two and over four ranks are uneven."""


@dataclass
class Places:
    """All groups of the script, made by one rank in the same order as by the others."""

    rank: int

    def __post_init__(self) -> None:
        self.mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        self.line = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("all",))
        self.flat = self.mesh._flatten("both")
        self.pair = dist.new_group([self.rank // 2 * 2, self.rank // 2 * 2 + 1], use_local_synchronization=True)
        self.odd = dist.new_group([1, 3], timeout=timedelta(seconds=50))
        self.three = dist.new_group([3, 0, 1])
        gone = dist.new_group([0, 1, 2, 3])
        dist.destroy_process_group(gone)
        by_row, _ = dist.new_subgroups(2)  # type: ignore[no-untyped-call]
        self.row = by_row

    @property
    def meshes(self) -> list[DeviceMesh]:
        return [self.mesh["outer"], self.mesh["inner"], self.line, self.flat]


Case = Callable[[Places], Any]
wait_tensor: Callable[[torch.Tensor], torch.Tensor] = funcol.wait_tensor


def rows(place: Places, count: int = SIZE, *, salt: int = 0) -> torch.Tensor:
    return data(torch.float64, (count, 3), place.rank, salt)


def sub_meshes(place: Places) -> Any:
    found: list[Any] = []
    for mesh in place.meshes:
        group = mesh.get_group()
        tensor = rows(place)
        dist.all_reduce(tensor, group=group)
        found += [tensor, dist.get_process_group_ranks(group), mesh.get_local_rank(), mesh.size()]
    return found


def groups_of_all_kinds(place: Places) -> Any:
    found: list[Any] = []
    for group in (place.pair, place.odd, place.three, place.row):
        if dist.get_rank(group) >= 0:
            tensor = rows(place)
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
            dist.broadcast(tensor, group_src=0, group=group)
            found += [tensor, dist.get_rank(group), dist.get_world_size(group), dist.get_process_group_ranks(group)]
    return found


def functional(place: Places) -> Any:
    group = place.line.get_group()
    given = rows(place, 8)
    found: list[Any] = [
        funcol.all_reduce(given, "sum", group),
        funcol.all_gather_tensor(given, 0, group),
        funcol.all_gather_tensor(given, 1, group),
        funcol.reduce_scatter_tensor(given, "avg", 0, group),
        funcol.all_to_all_single(given, [2] * 4, [2] * 4, group),
        funcol.broadcast(given, 2, group),
        *funcol.all_reduce_coalesced([given, given + 1], "max", group),
        *funcol.all_gather_into_tensor_coalesced([given, given * 2], group),
        *funcol.reduce_scatter_tensor_coalesced([given, given * 2], "sum", [0, 0], group),
    ]
    return [wait_tensor(item) for item in found]


def functional_uneven(place: Places) -> Any:
    splits = [place.rank + peer for peer in range(WORLD)]
    given = rows(place, sum(splits))
    return wait_tensor(funcol.all_to_all_single(given, splits, splits, place.line.get_group()))


def functional_backward(place: Places) -> Any:
    given = rows(place, 8).requires_grad_()
    gathered = funcol.all_gather_tensor_autograd(given, 0, place.mesh["inner"].get_group())
    part = funcol.reduce_scatter_tensor_autograd(gathered.square(), "sum", 0, place.mesh["outer"].get_group())
    part.square().sum().backward()  # torch 2.11 takes no expanded gradient
    return [part.detach(), given.grad]


def compiled(place: Places) -> Any:
    group = place.mesh["inner"].get_group()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def region(x: torch.Tensor) -> Any:
        whole = funcol.all_gather_tensor(x * 2, 0, group)
        return funcol.all_reduce(whole + 1, "sum", place.line.get_group())

    return region(rows(place))


def redistributed(place: Places) -> Any:
    found = []
    full = data(torch.float64, (SIZE, 7), 0)
    for before in (Shard(0), Shard(1), Replicate()):
        for after in (Shard(0), Shard(1), Replicate()):
            for mesh in (place.line, place.mesh["inner"]):
                moved = distribute_tensor(full, mesh, [before]).redistribute(placements=[after])
                found += [moved.to_local(), moved.full_tensor()]
    part = DTensor.from_local(rows(place), place.mesh, [Partial(), Replicate()], run_check=False)
    found += [part.redistribute(placements=[Shard(0), Shard(1)]).to_local(), part.full_tensor()]
    both = distribute_tensor(full, place.mesh, [Shard(0), Shard(1)])
    product: Any = both @ both.t()
    return [*found, both.redistribute(placements=[Shard(1), Shard(0)]).to_local(), product.full_tensor()]


def coalesced(place: Places) -> Any:
    tensors = [rows(place, salt=salt) for salt in range(3)]
    with _coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    gathered = [torch.zeros(SIZE * WORLD, 3, dtype=torch.float64) for _ in tensors]
    with _coalescing_manager(async_ops=True) as pending:
        for into, tensor in zip(gathered, tensors, strict=True):
            dist.all_gather_into_tensor(into, tensor)
    pending.wait()
    parts = [torch.zeros(SIZE, 3, dtype=torch.float64) for _ in tensors]
    with _coalescing_manager(group=place.flat.get_group()):
        for into, given in zip(parts, gathered, strict=True):
            dist.reduce_scatter_tensor(into, given, group=place.flat.get_group())
    return [*tensors, *gathered, *parts]


def neighbours(place: Places) -> Any:
    group = place.line.get_group()
    right, left = (place.rank + 1) % WORLD, (place.rank - 1) % WORLD
    first, second = torch.zeros(SIZE, 3, dtype=torch.float64), torch.zeros(70_000, dtype=torch.float64)
    ops = [
        dist.P2POp(dist.irecv, first, left, group),
        dist.P2POp(dist.isend, rows(place), right, group),
        dist.P2POp(dist.irecv, second, left, group),
        dist.P2POp(dist.isend, torch.full((70_000,), float(place.rank), dtype=torch.float64), right, group),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait(timedelta(seconds=30))
    # A chain, as a pipeline sends: through a group of two, one way after the other.
    stage, other = dist.get_rank(place.pair), 1 - dist.get_rank(place.pair)
    third = rows(place)
    if stage == 0:
        dist.send(third, group_dst=other, group=place.pair)
    else:
        dist.recv(third, group_src=other, group=place.pair)
    return [first, second, third]


def from_anyone(place: Places) -> Any:
    if place.rank:
        dist.send(rows(place), 0)
        return []
    came = {}
    for _ in range(WORLD - 1):
        tensor = torch.zeros(SIZE, 3, dtype=torch.float64)
        source = dist.recv(tensor)
        came[source] = tensor
    return sorted(came.items())


def objects(place: Places) -> Any:
    gathered: list[Any] = [None] * 2
    dist.all_gather_object(gathered, {"rank": place.rank}, group=place.pair)
    sent: list[Any] = [f"from {place.rank}", place.rank * 10**9, None]
    dist.broadcast_object_list(sent, group_src=1, group=place.mesh["outer"].get_group())
    onto: list[Any] | None = [None] * WORLD if place.rank == 2 else None
    dist.gather_object((place.rank,), onto, dst=2)
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [["for", to] for to in range(WORLD)] if place.rank == 3 else None, src=3)
    passed: list[Any] = [None, None]
    if place.rank == 1:
        dist.send_object_list([{"deep": [1]}, "x" * 50], dst=0)
    elif place.rank == 0:
        dist.recv_object_list(passed, src=1)
    return [gathered, sent, onto, mine, passed]


def base_calls(place: Places) -> Any:
    group = place.mesh["inner"].get_group()
    gathered, part = torch.zeros(SIZE * 2, 3, dtype=torch.float64), torch.zeros(3, 3, dtype=torch.float64)
    works = [dist.all_gather_into_tensor(gathered, rows(place), group=group, async_op=True)]
    works.append(dist.reduce_scatter_tensor(part, rows(place, 6), group=group, async_op=True))
    splits = [place.rank + peer for peer in range(WORLD)]
    uneven = torch.zeros(sum(splits), 3, dtype=torch.float64)
    works.append(dist.all_to_all_single(uneven, rows(place, sum(splits)), splits, splits, async_op=True))
    for work in works:
        work.wait(timedelta(seconds=30))
    dist.barrier(group=group)
    dist.barrier()
    return [gathered, part, uneven]


CASES: dict[str, Case] = {
    "sub-meshes": sub_meshes,
    "groups of all kinds": groups_of_all_kinds,
    "functional collectives": functional,
    "functional, uneven": functional_uneven,
    "functional, backward": functional_backward,
    "in a compiled region": compiled,
    "tensors redistributed": redistributed,
    "coalesced": coalesced,
    "neighbours": neighbours,
    "from anyone": from_anyone,
    "objects": objects,
    "base calls": base_calls,
}


def shapes(value: Any) -> Any:
    """Part of an answer that is right while collectives are answered locally."""
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), list(value.shape)]
    if isinstance(value, list | tuple):
        return [shapes(item) for item in value]
    return type(value).__name__


def plain(value: Any) -> Any:
    """For comparing between processes, sums up to what another order of summation makes."""
    if isinstance(value, torch.Tensor):
        return [list(value.shape), [round(number, 9) for number in value.detach().double().flatten().tolist()]]
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value
