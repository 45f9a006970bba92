"""One rank of a model on a mesh, in a world that changes its size between steps, as the parent says."""

from collections.abc import Callable
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from tests.process.comm_world import DEADLINE, Seat
from tests.scripts.train_parallel import value
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import mse_loss
from torch.optim import AdamW

from regrow.comm.groups import Formation, Groups
from regrow.comm.torch_private import device_mesh, fsdp
from regrow.core.ids import Generation
from regrow.data.seeding import seed_everything
from regrow.train.dealers import dealer
from regrow.train.gradients.wrappers import Modules
from regrow.train.microbatches import Dealer, MicroBatches
from regrow.train.sharing import share_of
from regrow.train.state.protected import ProtectedState

UNIT, MICROBATCHES, BATCH = 2, 6, 12


class Net(nn.Module):
    """Two layers; an odd width has uneven shards."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.act, self.drop = nn.Linear(7, width), nn.GELU(), nn.Dropout(0.1)
        self.down = nn.Linear(width, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.down(self.drop(self.act(self.up(x)))))


def hsdp(world: int) -> tuple[nn.Module, DeviceMesh]:
    """Shards over the places of a replica; the data is dealt out to all ranks."""
    mesh = init_device_mesh("cpu", (world // UNIT, UNIT), mesh_dim_names=("dp_replicate", "dp_shard"))
    flat = mesh["dp_replicate", "dp_shard"]._flatten("dp")
    model = Net(13)
    for layer in (model.up, model.down):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, flat


def tensor_parallel(world: int) -> tuple[nn.Module, DeviceMesh]:
    """Splits layers over the places of a replica, which all read the same data."""
    mesh = init_device_mesh("cpu", (world // UNIT, UNIT), mesh_dim_names=("dp", "tp"))
    model = Net(14)
    model.drop.p = 0.0  # each rank would draw for its own columns
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    replicate(model, mesh=mesh["dp"])
    return model, mesh["dp"]


WAYS: dict[str, Callable[[int], tuple[nn.Module, DeviceMesh]]] = {"hsdp": hsdp, "tp": tensor_parallel}


def batch_of(step: int, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows `start` to `stop` of a step's global batch."""
    source = torch.Generator().manual_seed(step)
    return (
        torch.randn(BATCH, 7, generator=source)[start:stop],
        torch.randn(BATCH, 5, generator=source)[start:stop],
    )


def share(step: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One row of a micro-batch of two for each of the ranks of a replica."""
    return batch_of(step, number, number + 1)


class Rank:
    """Builds as a session would, and trains in the worlds that it is told of."""

    def __init__(self, seat: Seat, address: str, way: str, *, invariant: bool, alone: bool, generation: int) -> None:
        self.take_rank, self.address = seat, address
        self.rank, self.world = seat.rank, seat.size
        self.groups = Groups()
        self.groups.unit = UNIT
        formation = None if alone else self.formation(seat.rank, seat.size, generation)
        device_mesh.watch()
        self.groups.install(rank=seat.rank, world=seat.size, formation=formation, form_s=DEADLINE)
        seed_everything(1)
        self.model, self.data = WAYS[way](self.world)
        self.optimizer = AdamW(self.model.parameters(), lr=3e-2)
        self.protected = [self.model, self.optimizer]
        self.modules = Modules([self.model])
        self.dealer: Dealer | None = None
        if invariant:
            state = ProtectedState((self.model, self.optimizer), {})
            self.dealer = dealer(share, state, self.modules, seed=1, count=MICROBATCHES, invariant=True)
        self.said = device_mesh.refusal(self.protected, unit=UNIT, world=self.world)
        self.groups.let_follow(
            device_mesh.follows(unit=UNIT, world=self.world), device_mesh.inside(unit=UNIT, world=self.world)
        )
        before = [item.clone() for item in self.state()]
        with self.groups.echo():
            self.train(0, rehearsal=True)
        made = self.state()[len(before) :]  # by the optimizer, which starts from zero
        self.load([item.numpy() for item in [*before, *map(torch.zeros_like, made)]])

    def formation(self, rank: int, world: int, generation: int) -> Formation:
        return Formation(Generation(generation), rank, world, self.address, self.take_rank.site)

    def form(self, rank: int, world: int, generation: int) -> None:
        self.groups.halt()
        fsdp.reset_unfinished(self.modules.sharded)
        self.groups.form(self.formation(rank, world, generation), lambda: False)
        device_mesh.resize(self.protected, unit=UNIT, before=self.world, world=world, rank=rank)
        self.rank, self.world = rank, world
        fsdp.reshard(self.modules.sharded)

    def train(self, step: int, *, rehearsal: bool = False) -> tuple[float, float]:
        """The loss of the global batch, and the norm of its gradient."""
        place = share_of(self.data)
        assert place is not None
        loss = self.through(step, *place, rehearsal) if self.dealer is not None else self.plainly(step, *place)
        norm = value(nn.utils.clip_grad_norm_(self.model.parameters(), 0.3))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss, norm

    def plainly(self, step: int, at: int, of: int) -> float:
        torch.manual_seed(step)
        x, y = batch_of(step, at * BATCH // of, (at + 1) * BATCH // of)
        loss = mse_loss(self.model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return float(mean) / dist.get_world_size()

    def through(self, step: int, at: int, of: int, rehearsal: bool) -> float:
        """By micro-batches."""
        assert self.dealer is not None
        found: dict[str, float] = {}
        given = self.dealer.batch(step, at, of)
        assert isinstance(given, MicroBatches)
        given.enter(
            cast(Any, SimpleNamespace(rehearsed=rehearsal, log=found.update, hear=lambda _: None, read=lambda *_: None))
        )
        for micro in given:
            x, y = micro.batch
            loss = mse_loss(self.model(x), y)
            micro.log(loss=loss)
            micro.backward(loss)
        given.leave()
        return found.get("loss", 0.0)

    def state(self) -> list[torch.Tensor]:
        kept = [*self.model.parameters(), *(item for at in self.optimizer.state.values() for item in at.values())]
        return [(item.to_local() if isinstance(item, DTensor) else item).detach() for item in kept]

    def load(self, kept: list[np.ndarray[Any, Any]]) -> None:
        with torch.no_grad():
            for mine, other in zip(self.state(), kept, strict=True):
                mine.copy_(torch.from_numpy(other))
        fsdp.reshard(self.modules.sharded)

    def places(self) -> dict[str, Any]:
        """Places that meshes and groups report for this rank."""
        data, root = self.data, self.data._get_root_mesh()
        total = torch.tensor([float(self.rank)])
        dist.all_reduce(total, group=data.get_group())
        return {
            "shape": tuple(root.shape),
            "mesh": root.mesh.tolist(),
            "coordinate": root.get_coordinate(),
            "data": data.mesh.tolist(),
            "share": share_of(data),
            "slices": [root[name].mesh.tolist() for name in root.mesh_dim_names or ()],
            "total": float(total),
            "world": dist.get_world_size(),
        }


def obey(
    seat: Seat, address: str, way: str, invariant: bool, alone: bool, generation: int, *, pipe: Connection
) -> None:
    """Build, then do what the parent says until it says nothing more."""
    rank = Rank(seat, address, way, invariant=invariant, alone=alone, generation=generation)
    pipe.send(("", rank.said))
    while True:
        match pipe.recv():
            case ("form", at, world, generation):
                rank.form(at, world, generation)
                pipe.send(("", "formed"))
            case ("train", first, stop):
                pipe.send(("", [rank.train(step) for step in range(first, stop)]))
            case ("places",):
                pipe.send(("", rank.places()))
            case ("state",):
                pipe.send(("", [item.numpy() for item in rank.state()]))
            case ("load", kept):
                rank.load(kept)
                pipe.send(("", "loaded"))
            case _:
                return
