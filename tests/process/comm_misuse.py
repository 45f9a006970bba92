"""Calls of collectives that do not fit each other, or cannot be right; and some beyond plain sums."""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from tests.process.comm_world import Seat
from torch import nn
from torch._C._distributed_c10d import _make_nccl_premul_sum
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from regrow.comm.groups import Formation, Groups
from regrow.comm.torch_private.internals import AllreduceOptions, BroadcastOptions
from regrow.comm.transport import MeshTransport
from regrow.core.errors import CollectiveMisuse
from regrow.core.ids import Generation

LARGE = 300_000
Op = dist.ReduceOp
WAIT = timedelta(seconds=30)


def _reduce(count: int, dtype: torch.dtype = torch.float32, op: Any = Op.SUM) -> Callable[[MeshTransport], None]:
    def call(transport: MeshTransport) -> None:
        options = AllreduceOptions()
        options.reduceOp = op
        transport.call("allreduce", ([torch.ones(count, dtype=dtype)], options), {}).wait(WAIT)

    return call


def _broadcast(transport: MeshTransport) -> None:
    options = BroadcastOptions()
    options.rootRank = 0
    transport.call("broadcast", ([torch.ones(2)], options), {}).wait(WAIT)


def _barrier(transport: MeshTransport) -> None:
    transport.call("barrier", (), {}).wait(WAIT)


def _both(*calls: Callable[[MeshTransport], None]) -> Callable[[MeshTransport], None]:
    def call(transport: MeshTransport) -> None:
        for each in calls:
            each(transport)

    return call


MISMATCHES: dict[str, tuple[Callable[[MeshTransport], None], Callable[[MeshTransport], None]]] = {
    "sizes": (_both(_barrier, _reduce(2)), _both(_barrier, _reduce(3))),
    "nothing and something": (_reduce(0), _reduce(3)),
    "large": (_reduce(LARGE), _reduce(LARGE + 1)),
    "dtypes": (_reduce(4), _reduce(2, torch.float64)),
    "reductions": (_reduce(2), _reduce(2, op=Op.MAX)),
    "operations": (_reduce(2), _barrier),
    "one more": (_both(_broadcast, _broadcast, _reduce(2)), _both(_broadcast, _reduce(2))),
}
"""Calls of rank 0, and those of the others."""


def mismatches(seat: Seat) -> dict[str, str]:
    """Error of each rank, on a mesh of its own for each case."""
    said = {}
    for name, calls in MISMATCHES.items():
        transport = seat.transport(name)
        try:
            calls[min(seat.rank, 1)](transport)
            said[name] = "nothing was raised"
        except CollectiveMisuse as error:
            said[name] = str(error)
            assert transport.misuse() is error
        except RuntimeError as error:
            said[name] = f"a symptom: {error}"
        assert transport.broke()
        transport.halt()  # as the coordinator has it done, for who still waits
    return said


def _joined(seat: Seat, address: str) -> Groups:
    groups = Groups()
    formation = Formation(Generation(1), seat.rank, seat.size, address, seat.site)
    groups.install(rank=seat.rank, world=seat.size, formation=formation, form_s=30.0)
    return groups


def _sparse(rows: list[int], size: int = 6) -> torch.Tensor:
    values = torch.arange(1.0, len(rows) + 1)[:, None] * torch.tensor([1.0, 0.5])
    return torch.sparse_coo_tensor(torch.tensor([rows]), values, (size, 2))


BAD: dict[str, Callable[[int, int], Any]] = {
    "bitwise of floats": lambda rank, size: dist.all_reduce(torch.ones(2), op=Op.BAND),
    "average of booleans": lambda rank, size: dist.all_reduce(torch.ones(2, dtype=torch.bool), op=Op.AVG),
    "maximum of sparse": lambda rank, size: dist.all_reduce(_sparse([1]), op=Op.MAX),
    "sparse": lambda rank, size: dist.broadcast(_sparse([1]), 0),
    "too few outputs": lambda rank, size: dist.all_gather([torch.ones(2)], torch.ones(2)),
    "other outputs": lambda rank, size: dist.all_gather([torch.ones(3)] * size, torch.ones(2)),
    "rows": lambda rank, size: dist.all_gather_into_tensor(torch.ones(5), torch.ones(size)),
    "parts": lambda rank, size: dist.reduce_scatter_tensor(torch.ones(2), torch.ones(2 * size + 1)),
    "splits": lambda rank, size: dist.all_to_all_single(torch.ones(size), torch.ones(size), [2] * size, [1] * size),
    "uneven": lambda rank, size: dist.all_to_all_single(torch.ones(size + 1), torch.ones(size + 1)),
}


def refused(seat: Seat, address: str) -> dict[str, str]:
    """Bad calls are errors of the calling line, with and without peers, and spoil nothing."""
    groups, said = _joined(seat, address), {}
    for name, call in BAD.items():
        told = []
        for local in (True, False):
            try:
                if local:
                    with groups.echo():
                        call(seat.rank, seat.size)
                else:
                    call(seat.rank, seat.size)
                told.append("nothing was raised")
            except CollectiveMisuse as error:
                told.append(str(error))
        assert told[0] == told[1], told
        said[name] = told[0]
    total = torch.ones(2)
    dist.all_reduce(total)
    assert total.tolist() == [float(seat.size)] * 2
    assert not groups.broke()
    return said


def reductions(seat: Seat, address: str) -> dict[str, Any]:
    """Averages of integers, sums with a factor, sums of sparse tensors."""
    _joined(seat, address)
    whole = torch.tensor([-3, 3, 5, 7 * (seat.rank + 1)])
    dist.all_reduce(whole[:3] if seat.rank == 0 else whole[:3].mul_(2), op=Op.AVG)
    scaled, part = torch.full((3,), float(seat.rank + 1)), torch.zeros(2)
    by_half = _make_nccl_premul_sum(0.5)
    dist.all_reduce(scaled, op=by_half)
    parts = torch.arange(2.0 * seat.size)
    dist.reduce_scatter_tensor(part, parts, op=by_half)
    sparse = _sparse([seat.rank, 4, seat.rank])
    dist.all_reduce(sparse)
    return {
        "average": whole[:3].tolist(),
        "scaled": [scaled.tolist(), part.tolist(), parts.tolist()],
        "sparse": sparse.to_dense().tolist(),
    }


class Words(nn.Module):
    """A model whose embedding has sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(20, 4, sparse=True), nn.Linear(4, 2)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(self.table(words))
        return out


def _trained(model: nn.Module, rank: int, hook: Callable[[DistributedDataParallel], None]) -> list[float]:
    ddp = DistributedDataParallel(model)
    hook(ddp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    words = isinstance(model, Words)
    for step in range(4):
        source = torch.Generator().manual_seed(10 * step + rank)
        given = torch.randint(0, 20, (6,), generator=source) if words else torch.randn(6, 64, generator=source)
        optimizer.zero_grad()
        ddp(given).square().mean().backward()
        optimizer.step()
    return [round(value, 5) for each in model.parameters() for value in each.detach().flatten()[:40].tolist()]


def _chained(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """Two reductions, of which the second is called by the first one's end: half of the mean, twice."""

    def again(future: "torch.futures.Future[Any]") -> torch.Tensor:
        half = future.value()[0].div_(2 * dist.get_world_size())
        dist.all_reduce(half, async_op=True).get_future().wait()
        mean: torch.Tensor = half.mul_(2 / dist.get_world_size())
        return mean

    chained: torch.futures.Future[torch.Tensor] = (
        dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(again)
    )
    return chained


def _no_hook(_: DistributedDataParallel) -> None:
    """The gradients as they are."""


def _compressed(ddp: DistributedDataParallel) -> None:
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)


def _by_power(ddp: DistributedDataParallel) -> None:
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.5, use_error_feedback=False
    )
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def hooks(seat: Seat, address: str | None) -> dict[str, list[float]]:
    """Weights that DDP learns with communication hooks, and from sparse gradients; on gloo if there is no address."""
    if address is None:
        dist.init_process_group("gloo", store=seat.store("pg"), rank=seat.rank, world_size=seat.size)
    else:
        _joined(seat, address)

    def net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 8))

    torch.manual_seed(0)
    found = {
        "sparse": _trained(Words(), seat.rank, _no_hook),
        "plain": _trained(net(), seat.rank, _no_hook),
        "compressed": _trained(net(), seat.rank, _compressed),
    }
    if address is not None:  # on gloo these two hang now and then
        found["chained"] = _trained(net(), seat.rank, lambda ddp: ddp.register_comm_hook(None, _chained))
        found["power"] = _trained(net(), seat.rank, _by_power)
    return found


def callbacks(seat: Seat, address: str) -> list[Any]:
    """A callback calls a collective and waits for it, waits for one that comes later, and for its own."""
    _joined(seat, address)
    threads, order = set(), list[str]()

    def inner(future: "torch.futures.Future[Any]") -> float:
        threads.add(threading.current_thread().name)
        work = dist.all_reduce(future.value()[0], async_op=True)
        work.get_future().wait()
        order.append("inner")
        return float(future.value()[0][0])

    first = dist.all_reduce(torch.ones(LARGE), async_op=True)
    nested = first.get_future().then(inner)
    second = dist.all_reduce(torch.ones(LARGE), async_op=True)
    later: list[Any] = []

    def outer(_: "torch.futures.Future[Any]") -> None:
        later[0].wait()
        first.wait()
        order.append("later")

    waited = second.get_future().then(outer)
    later.append(dist.all_reduce(torch.ones(LARGE), async_op=True))
    nested_sum = nested.wait()
    waited.wait()
    dist.barrier()
    return [nested_sum, order]
