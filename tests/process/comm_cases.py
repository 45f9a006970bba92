"""Cases of the conformance suite that every transport must pass."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from tests.process.comm_world import Call

from regrow.comm.torch_private.internals import (
    AllgatherOptions,
    AllreduceOptions,
    BroadcastOptions,
    ReduceScatterOptions,
)

Case = Callable[[Call, int, int], list[torch.Tensor]]
Op = dist.ReduceOp
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64]
SHAPES: dict[str, tuple[int, ...]] = {
    "scalar": (),
    "empty": (0, 3),
    "one": (1,),
    "tiny": (3,),
    "odd": (1001, 7),
    "pieces": (40_003,),
}
LARGE = 300_000


def data(dtype: torch.dtype, shape: tuple[int, ...], rank: int, salt: int = 0) -> torch.Tensor:
    source = torch.Generator().manual_seed(1000 * salt + rank)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=source, dtype=torch.float64).to(dtype)
    return torch.randint(0, 2 if dtype is torch.bool else 50, shape, generator=source).to(dtype)


def options(kind: Any, op: Any = None, root: int | None = None) -> Any:
    made = kind()
    if op is not None:
        made.reduceOp = op
    if root is not None:
        made.rootRank = root
    return made


def strided(rank: int) -> torch.Tensor:
    return data(torch.float32, (90, 101), rank).t()[::2]


def reductions() -> Iterator[tuple[str, Case]]:
    kinds = list(product(DTYPES, [Op.SUM, Op.AVG, Op.PRODUCT, Op.MIN, Op.MAX]))
    kinds = [(dtype, op) for dtype, op in kinds if op != Op.AVG or dtype.is_floating_point]
    kinds += product([torch.int64, torch.bool], [Op.BAND, Op.BOR])
    kinds += [(torch.int64, Op.BXOR), (torch.bool, Op.MAX), (torch.bool, Op.MIN)]
    for (dtype, op), shape in product(kinds, SHAPES):
        name = f"all_reduce {str(dtype).removeprefix('torch.')} {str(op).rpartition('.')[2]} {shape}"
        yield name, _all_reduce(partial(data, dtype, SHAPES[shape]), op)
    yield "all_reduce strided", _all_reduce(strided, Op.SUM)
    yield "all_reduce row of a matrix", _all_reduce(lambda rank: data(torch.float32, (5, 9), rank)[3], Op.SUM)


def _all_reduce(make: Callable[[int], torch.Tensor], op: Any) -> Case:
    def case(call: Call, rank: int, size: int) -> list[torch.Tensor]:
        tensor = make(rank)
        call("allreduce", [tensor], options(AllreduceOptions, op))
        return [tensor]

    return case


def _broadcast(call: Call, rank: int, size: int) -> list[torch.Tensor]:
    out = [data(torch.float32, shape, rank) for shape in SHAPES.values()] + [strided(rank)]
    for at, tensor in enumerate(out):
        call("broadcast", [tensor], options(BroadcastOptions, root=at % size))
    return out


def _all_gather(call: Call, rank: int, size: int) -> list[torch.Tensor]:
    out = []
    for dtype, shape in product([torch.float32, torch.bfloat16, torch.int64, torch.bool], SHAPES.values()):
        row = [torch.zeros(shape, dtype=dtype) for _ in range(size)]
        call("allgather", [row], [data(dtype, shape, rank)], options(AllgatherOptions))
        out += row
    return out


def _all_gather_strided(call: Call, rank: int, size: int) -> list[torch.Tensor]:
    given = strided(rank)
    row = [torch.zeros(given.shape) for _ in range(size)]
    call("allgather", [row], [given], options(AllgatherOptions))
    return row


def _all_gather_coalesced(call: Call, rank: int, size: int) -> list[torch.Tensor]:
    given = [data(torch.float32, shape, rank, salt) for salt, shape in enumerate([(3,), (2, 5), (7000,)])]
    rows = [[torch.zeros_like(tensor) for tensor in given] for _ in range(size)]
    call("allgather_coalesced", rows, given, options(AllgatherOptions))
    return [tensor for row in rows for tensor in row]


def _all_gather_into(call: Call, rank: int, size: int) -> list[torch.Tensor]:
    out = []
    for shape in [(1,), (3,), (1001, 7)]:
        joined = torch.zeros(size * shape[0], *shape[1:])
        call("_allgather_base", joined, data(torch.float32, shape, rank), options(AllgatherOptions))
        out.append(joined)
    return out


def _reduce_scatter(call: Call, rank: int, size: int) -> list[torch.Tensor]:
    out = []
    for (_, shape), op in product(SHAPES.items(), [Op.SUM, Op.MAX]):
        parts = [data(torch.float32, shape, rank, salt) for salt in range(size)]
        got = torch.zeros(shape)
        call("reduce_scatter", [got], [parts], options(ReduceScatterOptions, op))
        out.append(got)
    return out


def _reduce_scatter_from(call: Call, rank: int, size: int) -> list[torch.Tensor]:
    out = []
    for (rows, columns), dtype in product([(1, 1), (3, 5), (1001, 7)], DTYPES):
        got = torch.zeros(rows, columns, dtype=dtype)
        given = data(dtype, (size * rows, columns), rank)
        call("_reduce_scatter_base", got, given, options(ReduceScatterOptions, Op.SUM))
        out.append(got)
    return out


def _reduce(call: Call, rank: int, size: int) -> list[torch.Tensor]:
    out = []
    for at, (shape, op) in enumerate(product(SHAPES.values(), [Op.SUM, Op.PRODUCT])):
        tensor = data(torch.float64, shape, rank)
        call("reduce", [tensor], options(dist.ReduceOptions, op, root=at % size))
        out += [tensor] if rank == at % size else []  # what the others have then is not specified
    return out


def _gather(call: Call, rank: int, size: int) -> list[torch.Tensor]:
    out = []
    for root, shape in product(range(size), SHAPES.values()):
        row = [torch.zeros(shape) for _ in range(size)] if rank == root else []
        outputs = [row] if rank == root else []
        call("gather", outputs, [data(torch.float32, shape, rank)], options(dist.GatherOptions, root=root))
        out += row
    return out


def _scatter(call: Call, rank: int, size: int) -> list[torch.Tensor]:
    out = []
    for root, shape in product(range(size), SHAPES.values()):
        got = torch.zeros(shape)
        parts = [[data(torch.float32, shape, rank, salt) for salt in range(size)]] if rank == root else []
        call("scatter", [got], parts, options(dist.ScatterOptions, root=root))
        out.append(got)
    return out


def _all_to_all_single(call: Call, rank: int, size: int) -> list[torch.Tensor]:
    got = torch.zeros(size * 3, 5)
    call("alltoall_base", got, data(torch.float32, (size * 3, 5), rank), [], [], options(dist.AllToAllOptions))
    # Rank r sends r + p rows to rank p; so rank 0 sends itself none.
    splits = [rank + peer for peer in range(size)]
    uneven = torch.zeros(sum(splits), 4, dtype=torch.int64)
    given = data(torch.int64, (sum(splits), 4), rank)
    call("alltoall_base", uneven, given, splits, splits, options(dist.AllToAllOptions))
    return [got, uneven]


def _barrier(call: Call, rank: int, size: int) -> list[torch.Tensor]:
    call("barrier", dist.BarrierOptions())
    return []


CASES: dict[str, Case] = {
    **dict(reductions()),
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "all_gather strided": _all_gather_strided,
    "all_gather_coalesced": _all_gather_coalesced,
    "all_gather_into": _all_gather_into,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_from": _reduce_scatter_from,
    "reduce": _reduce,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all_single": _all_to_all_single,
    "barrier": _barrier,
}


def compare(name: str, ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    """Equal, floats within what another order of summation makes."""
    assert len(ours) == len(theirs)
    for left, right in zip(ours, theirs, strict=True):
        close = {torch.bfloat16: (0.05, 0.1), torch.float32: (1e-5, 1e-5), torch.float64: (1e-12, 1e-12)}
        relative, absolute = close.get(left.dtype, (0.0, 0.0))
        torch.testing.assert_close(left, right, rtol=relative, atol=absolute, msg=lambda text: f"{name}: {text}")
