"""Parts of many ranks, read back by the same ranks, by others, and by plain `torch.distributed.checkpoint`."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.unit.hydration.checkpoint_cases import Pieces, rows, save, source
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.multiprocessing.spawn import spawn

from regrow.core.errors import CheckpointError, StateError
from regrow.core.ids import Rank, StepNo
from regrow.hydration.durable.reader import load, manifest_of
from regrow.hydration.durable.storage import place
from regrow.hydration.durable.writer import finish, write_parts
from regrow.hydration.shards import Box


def tensors() -> dict[str, torch.Tensor]:
    numbers = torch.Generator().manual_seed(1)
    return {
        "model.a": torch.randn(7, 4, generator=numbers),
        "model.b": torch.randn(3, 6, generator=numbers).bfloat16(),
        "model.norm": torch.randn(5, generator=numbers),
        "optim.a.step": torch.tensor(3.0),
    }


def by_rows(world: int, rank: int) -> dict[str, Box | None]:
    """Rows dealt out unevenly: of 7 and 3 rows over 4 ranks the last has 1 and 0; norm and step are on all."""
    a, b = rows(7, world, rank), rows(3, world, rank)
    empty: Box = ((0, 0), (0, 0))
    return {
        "model.a": (a, (0, 4)) if a[0] < a[1] else empty,
        "model.b": (b, (0, 6)) if b[0] < b[1] else empty,
        "model.norm": ((0, 5),),
        "optim.a.step": None,
    }


def by_columns(world: int, rank: int) -> dict[str, Box | None]:
    return {
        "model.a": ((0, 7), rows(4, world, rank)),
        "model.b": ((0, 3), rows(6, world, rank)),
        "model.norm": None,
        "optim.a.step": None,
    }


def world_of(size: int, boxes: Any) -> list[Pieces]:
    return [Pieces(rank, tensors(), boxes(size, rank)) for rank in range(size)]


def written(folder: Path, ranks: list[Pieces]) -> str:
    return save(place(str(folder)), [each.snapshot() for each in ranks], 5)


def read(folder: Path, name: str, pieces: Pieces, holding: str = "") -> None:
    load(pieces, place(str(folder)), name, holding=holding, rank=pieces.rank, piece=pieces.piece)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_each_rank_gets_its_own_pieces_and_python_state_back(tmp_path: Path, size: int) -> None:
    name = written(tmp_path, world_of(size, by_rows))
    for rank in range(size):
        fresh = Pieces(rank, {name: torch.zeros_like(each) for name, each in tensors().items()}, by_rows(size, rank))
        fresh.python = b""
        read(tmp_path, name, fresh, fresh.holding)
        expected = Pieces(rank, tensors(), by_rows(size, rank))
        assert all(torch.equal(fresh.tensors[each], expected.tensors[each]) for each in expected.tensors)
        assert fresh.python == f"python of rank {rank}".encode()
        assert fresh.finished


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("boxes", [by_rows, by_columns])
def test_another_mesh_reads_what_overlaps_its_own_pieces(tmp_path: Path, size: int, boxes: Any) -> None:
    name = written(tmp_path, world_of(4, by_rows))
    for rank in range(size):
        if boxes is by_columns and rank >= 2 and size == 3 and rows(4, size, rank) == (4, 4):
            continue
        fresh = Pieces(rank, {name: torch.zeros_like(each) for name, each in tensors().items()}, boxes(size, rank))
        read(tmp_path, name, fresh)
        expected = Pieces(rank, tensors(), boxes(size, rank))
        assert all(torch.equal(fresh.tensors[each], expected.tensors[each]) for each in expected.tensors)


def test_each_shard_is_on_disk_once(tmp_path: Path) -> None:
    name = written(tmp_path, world_of(4, by_rows))
    manifest = manifest_of(place(str(tmp_path)), name)
    assert manifest is not None
    for tensor in manifest.tensors.values():
        boxes = [chunk.box for chunk in tensor.chunks]
        assert len(boxes) == len(set(boxes))
    assert [chunk.file for chunk in manifest.tensors["model.norm"].chunks] == ["__0_0.distcp"]
    assert len(manifest.tensors["model.a"].chunks) == 4
    assert len(manifest.tensors["model.b"].chunks) == 3
    assert len(manifest.holdings) == 4


def test_parts_of_several_nodes_are_put_together_by_one(tmp_path: Path) -> None:
    ranks, at = world_of(4, by_rows), place(str(tmp_path))
    for node in (ranks[2:], ranks[:2]):
        write_parts(at, StepNo(5), 7, [source(each.snapshot(), 5) for each in node])
    name, nbytes, _ = finish(at, StepNo(5), 7, [Rank(rank) for rank in range(4)], 2)
    assert nbytes == sum(at.sizes(name).values())
    fresh = Pieces(0, {name: torch.zeros_like(each) for name, each in tensors().items()}, by_rows(1, 0))
    read(tmp_path, name, fresh)
    assert torch.equal(fresh.tensors["model.a"], tensors()["model.a"])
    manifest = manifest_of(at, name)
    assert manifest is not None
    assert [chunk.file for chunk in manifest.tensors["model.norm"].chunks] == ["__0_0.distcp"]


def test_a_missing_part_of_another_node_is_an_error_that_says_so(tmp_path: Path) -> None:
    ranks, at = world_of(2, by_rows), place(str(tmp_path))
    write_parts(at, StepNo(5), 7, [source(ranks[0].snapshot(), 5)])
    with pytest.raises(CheckpointError, match=r"part of rank 1 is not in .*shared|all of them share"):
        finish(at, StepNo(5), 7, [Rank(0), Rank(1)], 2)
    with pytest.raises(CheckpointError, match="no rank has written all of model"):
        finish(at, StepNo(5), 7, [Rank(0)], 2)


def test_parts_of_a_model_may_call_different_tensors_the_same(tmp_path: Path) -> None:
    values = {0: 0.0, 1: 1.0, 2: 1.0}
    stages = [
        {"model.w": torch.full((3,), values[rank]), "model.b": torch.full((2 + rank % 2,), values[rank])}
        for rank in range(3)
    ]
    names: dict[str, Box | None] = {"model.w": None, "model.b": None}
    name = written(tmp_path, [Pieces(rank, stage, names) for rank, stage in enumerate(stages)])
    for rank, stage in enumerate(stages):
        fresh = Pieces(rank, {each: torch.full_like(tensor, 9.0) for each, tensor in stage.items()}, names)
        read(tmp_path, name, fresh, fresh.holding)
        assert all(torch.equal(fresh.tensors[each], tensor) for each, tensor in stage.items())
    manifest = manifest_of(place(str(tmp_path)), name)
    assert manifest is not None
    assert {"model.w", "model.w@1", "model.b", "model.b@1", "model.b@2"} <= manifest.tensors.keys()
    assert "model.w@2" not in manifest.tensors  # what rank 1 wrote already


def test_different_values_of_one_shard_are_refused(tmp_path: Path) -> None:
    other = tensors() | {"model.a": torch.zeros(7, 4)}
    ranks = [Pieces(0, tensors(), by_rows(2, 0)), Pieces(1, other, by_rows(2, 0))]
    with pytest.raises(CheckpointError, match=r"rank 1 and a lower one have different values .* piece of model\.a"):
        written(tmp_path, ranks)


def test_a_damaged_shard_is_found_when_it_is_read(tmp_path: Path) -> None:
    name = written(tmp_path, world_of(2, by_rows))
    manifest = manifest_of(place(str(tmp_path)), name)
    assert manifest is not None
    chunk = manifest.tensors["model.a"].chunks[0]
    file = tmp_path / name / chunk.file
    data = bytearray(file.read_bytes())
    at = data.index(tensors()["model.a"][0, 0].numpy().tobytes(), chunk.offset)
    data[at] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match="damaged|could not be read"):
        read(tmp_path, name, Pieces(0, tensors(), by_rows(2, 0)))


def test_another_global_shape_is_refused_before_anything_changes(tmp_path: Path) -> None:
    name = written(tmp_path, world_of(2, by_rows))
    other = Pieces(0, tensors() | {"model.a": torch.ones(8, 4)}, by_rows(2, 0) | {"model.a": ((0, 4), (0, 4))})
    with pytest.raises(StateError, match=r"model\.a is float32\[8, 4\] here and float32\[7, 4\] on disk"):
        read(tmp_path, name, other)
    assert other.tensors["model.a"].min() == 1


def test_plain_distributed_checkpoint_loads_whole_tensors(tmp_path: Path) -> None:
    name = written(tmp_path, world_of(4, by_rows))
    content: dict[str, Any] = {name: torch.zeros_like(tensor) for name, tensor in tensors().items()}
    dcp_load(content, checkpoint_id=tmp_path / name, no_dist=True)
    assert all(torch.equal(content[name], tensor) for name, tensor in tensors().items())


@pytest.mark.parametrize("placement", [Shard(0), Shard(1)])
def test_plain_distributed_checkpoint_loads_dtensors_of_another_mesh(tmp_path: Path, placement: Shard) -> None:
    name = written(tmp_path / "ck", world_of(4, by_rows))
    spawn(_load_dtensors, args=(str(tmp_path), name, placement.dim), nprocs=3)  # type: ignore[no-untyped-call]


def _load_dtensors(rank: int, folder: str, name: str, dim: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=3)
    mesh = DeviceMesh("cpu", list(range(3)))
    whole = tensors()
    content = {each: distribute_tensor(torch.zeros_like(whole[each]), mesh, [Shard(dim)]) for each in list(whole)[:2]}
    dcp_load(content, checkpoint_id=f"{folder}/ck/{name}")
    for each, tensor in content.items():
        assert torch.equal(tensor.full_tensor(), whole[each])
    dist.barrier()
    os._exit(0)  # torch's gloo may abort, or hang, in its destructors
