"""Meshes in a world of another size, seen by one rank whose collectives are answered locally."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import debug
from torch.nn.parallel import DistributedDataParallel

from regrow.comm.group_ranks import RankInWorld
from regrow.comm.groups import Groups
from regrow.comm.torch_private import device_mesh
from regrow.core.errors import StateError

UNIT = 4


@pytest.fixture(scope="module", autouse=True)
def none_left() -> Iterator[None]:
    """Cycles and a cache of DTensor's hold meshes; the next test that has steps would take one for the world's."""
    yield
    debug._clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
    gc.collect()


@contextmanager
def seated(rank: int, world: int, unit: int = UNIT) -> Iterator[Groups]:
    """A process that builds as this rank."""
    gc.collect()
    device_mesh.watch()
    groups = Groups()
    groups.unit = unit
    groups.install(rank=rank, world=world, formation=None, form_s=1.0)
    try:
        yield groups
    finally:
        groups.close()


def made(rank: int, world: int, *, alone: bool) -> list[DeviceMesh]:
    """Meshes that a script may make of one. `alone`: also one of a single replica, by its ranks."""
    root = init_device_mesh("cpu", (world // UNIT, 2, 2), mesh_dim_names=("replica", "shard", "tp"))
    found = [
        root,
        root["replica", "shard"]._flatten("data"),
        root["shard", "tp"]._flatten("inside"),
        root["replica", "tp"],
        DeviceMesh._concatenate([root["replica", "shard"], root["tp"]]),
    ]
    if alone:
        first = rank - rank % UNIT
        found.append(DeviceMesh("cpu", [[first, first + 1], [first + 2, first + 3]], mesh_dim_names=("a", "b")))
    return found


def told(found: list[DeviceMesh]) -> list[Any]:
    return [
        [
            (mesh.mesh.tolist(), mesh.shape, mesh.get_coordinate(), hash(mesh), mesh.get_rank()),
            *((dist.get_process_group_ranks(group), group.rank(), group.size()) for group in mesh.get_all_groups()),
        ]
        for mesh in found
    ]


def fresh(rank: int, world: int, *, alone: bool) -> list[Any]:
    with seated(rank, world):
        return told(made(rank, world, alone=alone))


@pytest.mark.parametrize("worlds", [(4, 8, 4, 12, 8), (8, 4, 12), (12, 8, 16, 4, 8), (4, 4, 8)])
def test_they_become_what_they_would_have_been_in_that_world(worlds: tuple[int, ...]) -> None:
    grows = worlds[0] <= worlds[1]
    # Either in the first replica, or in the last, whose ranks change.
    places = [(1 if grows else world - UNIT + 1, world) for world in worlds]
    wanted = [fresh(*place, alone=not grows) for place in places]
    rank, world = places[0]
    with seated(rank, world) as groups:
        found = made(rank, world, alone=not grows)
        groups.let_follow(device_mesh.follows(unit=UNIT, world=world), device_mesh.inside(unit=UNIT, world=world))
        assert told(found) == wanted[0]
        for (rank, after), right in zip(places[1:], wanted[1:], strict=True):
            assert device_mesh.refusal([], unit=UNIT, world=world) == groups.fixed() == ""
            groups._follow(RankInWorld(rank, after))
            for group in groups._groups:
                group.take_rank(group.ranks.index(rank))
            device_mesh.resize([], unit=UNIT, before=world, world=after, rank=rank)
            world = after
            assert told(found) == right


def test_a_slice_made_afterwards_is_of_the_new_world() -> None:
    with seated(0, 4) as groups:
        root = init_device_mesh("cpu", (1, 4), mesh_dim_names=("replica", "shard"))
        groups.let_follow(device_mesh.follows(unit=UNIT, world=4), device_mesh.inside(unit=UNIT, world=4))
        groups._follow(RankInWorld(0, 12))
        device_mesh.resize([], unit=UNIT, before=4, world=12, rank=0)
        assert root["replica"].mesh.tolist() == [0, 4, 8]
        assert root["shard"].mesh.tolist() == [0, 1, 2, 3]


def test_the_default_group_is_no_dimension_of_shards() -> None:
    with seated(0, 4) as groups:
        root = init_device_mesh("cpu", (1, 4), mesh_dim_names=("replica", "shard"))
        assert root.get_group("shard") is not dist.group.WORLD
        groups.let_follow(device_mesh.follows(unit=UNIT, world=4), device_mesh.inside(unit=UNIT, world=4))
        groups._follow(RankInWorld(0, 8))
        assert dist.get_process_group_ranks(root.get_group("shard")) == [0, 1, 2, 3]
        assert dist.get_process_group_ranks(root.get_group("replica")) == [0, 4]
        assert dist.get_world_size() == 8


def test_a_mesh_whose_group_the_script_has_destroyed_is_passed_over() -> None:
    with seated(0, 8):
        done = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replica", "shard"))
        used = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replica", "shard"))
        dist.destroy_process_group(done.get_group("replica"))
        assert device_mesh.follows(unit=UNIT, world=8) == [used.get_group("replica")]
        assert device_mesh.inside(unit=UNIT, world=8) == [used.get_group("shard")]


def _sharded(mesh: DeviceMesh) -> list[object]:
    return [fully_shard(nn.Linear(8, 8), mesh=mesh)]


def _over_the_world() -> list[object]:
    return _sharded(init_device_mesh("cpu", (8,)))


def _shards_first() -> list[object]:
    """A mesh that numbers replicas along its second dimension."""
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("shard", "replica"))
    return [fully_shard(nn.Linear(8, 8), mesh=mesh["shard"])]


def _ddp_inside() -> list[object]:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("pp", "dp"))
    return [DistributedDataParallel(nn.Linear(2, 2), process_group=mesh.get_group("dp"), init_sync=False)]


def _mixed_order() -> list[object]:
    return [DeviceMesh("cpu", [[0, 2, 4, 6], [1, 3, 5, 7]])]


def _some_of_each() -> list[object]:
    return [DeviceMesh("cpu", [0, 1, 4])]


def _halves() -> list[object]:
    mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("all",))
    return [mesh._unflatten("all", (4, 2), ("outer", "inner"))]


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (_over_the_world, "sharded over replicas"),
        (_shards_first, "sharded over replicas"),
        (_ddp_inside, "DDP reduces over the ranks"),
        (_mixed_order, "does not number its ranks along its first dimension"),
        (_some_of_each, "neither of the world nor of a replica"),
        (_halves, "has a part of the dimension that counts replicas"),
    ],
)
def test_what_cannot_follow_is_refused_with_the_reason(make: Callable[[], list[object]], why: str) -> None:
    with seated(0, 8):
        protected = make()
        assert why in device_mesh.refusal(protected, unit=UNIT, world=8)
        del protected


def test_one_replica_alone_does_not_show_what_a_mesh_without_a_dimension_of_replicas_is() -> None:
    with seated(0, 4) as groups:
        mesh = init_device_mesh("cpu", (4,))
        assert "could be of all replicas or of one" in device_mesh.refusal([], unit=UNIT, world=4)
        groups._follow(RankInWorld(0, 8))
        with pytest.raises(StateError, match="could be of all replicas or of one"):
            device_mesh.resize([], unit=UNIT, before=4, world=8, rank=0)
        assert mesh.shape == (4,)
