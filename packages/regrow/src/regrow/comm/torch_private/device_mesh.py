"""Device meshes in a world that changes its size: the mesh objects stay the same, and get other ranks.

Ranks are numbered replica by replica, so a mesh of the whole world counts replicas by its first dimension. That
dimension becomes longer or shorter; slices and flattened dimensions that contain it follow. A mesh inside one replica
moves with that replica. FSDP2 and `DTensor` hold such meshes, and values that they derived from them are computed anew.

torch has no function for this. Its data of a mesh are fields of `torch.distributed.device_mesh.DeviceMesh`: a root has
a `_rank_map` in row-major order, and every mesh a `_layout` of sizes and strides into that of its root. Only this file
depends on these fields, as they are in torch 2.13.
"""

import functools
import math
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _mesh_layout
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, debug
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Replicate

from regrow.comm.torch_private import ddp, fsdp
from regrow.core.errors import StateError

_KNOWN: list["weakref.ref[DeviceMesh]"] = []
_SPANS = "_regrow_spans"
"""Attribute of a mesh: for each of its dimensions, whether it contains the first dimension of the mesh's root."""
_ACROSS = "_regrow_across"
"""Attribute of a root mesh: whether it covers all replicas, or only one."""
_CAN_FOLLOW = hasattr(_mesh_layout, "_FlatLayout") and hasattr(DeviceMesh, "_init_one_process_group")
_HINT = "number ranks replica by replica, and let the first dimension of the mesh count the replicas"


def watch() -> None:
    """From now on track every mesh, and give each of its dimensions a group of its own.

    Call it before the script makes any mesh. torch lets a dimension that spans the world use the default group. With
    one replica that would be the dimension of the shards, which must keep its ranks when the default group grows.
    """
    mesh_class: Any = DeviceMesh
    init, flatten = mesh_class.__init__, mesh_class._create_flatten_mesh
    if hasattr(init, "__wrapped__"):
        return

    @functools.wraps(init)
    def remembering(mesh: DeviceMesh, *args: Any, **options: Any) -> None:
        init(mesh, *args, **options)
        _KNOWN.append(weakref.ref(mesh, _KNOWN.remove))

    @functools.wraps(flatten)
    def flattening(mesh: DeviceMesh, name: str, *args: Any, **options: Any) -> None:
        flatten(mesh, name, *args, **options)
        setattr(mesh._get_root_mesh()._flatten_mapping[name], _SPANS, (any(_spans(mesh)),))

    mesh_class.__init__ = remembering
    if not _CAN_FOLLOW:
        return
    mesh_class._create_flatten_mesh = flattening
    one_group = mesh_class._init_one_process_group

    def own_group(layout: Any, rank_map: torch.Tensor, dim_name: str, override: Any) -> Any:
        if override == (None, None) and layout.numel() == dist.get_world_size() == rank_map.numel():
            return dist.new_group(rank_map.tolist(), group_desc=f"mesh_{dim_name}").group_name
        return one_group(layout, rank_map, dim_name, override)

    mesh_class._init_one_process_group = staticmethod(own_group)


def follows(*, unit: int, world: int) -> list[dist.ProcessGroup]:
    """Groups of the mesh dimensions that contain all replicas, even if there is only one replica."""
    found: list[dist.ProcessGroup] = []
    for mesh in _known():
        if _is_across(mesh._get_root_mesh(), unit, world) and _has_groups(mesh):
            found += [mesh.get_group(at) for at, spans in enumerate(_spans(mesh)) if spans]
    return found


def inside(*, unit: int, world: int) -> list[dist.ProcessGroup]:
    """Groups of the mesh dimensions that are inside a replica."""
    found: list[dist.ProcessGroup] = []
    for mesh in _known():
        if _is_across(mesh._get_root_mesh(), unit, world) and _has_groups(mesh):
            found += [mesh.get_group(at) for at, across in enumerate(_spans(mesh)) if not across]
    return found


def refusal(objects: Iterable[object], *, unit: int, world: int) -> str:
    """Reason why these objects and the script's meshes cannot get another world size, for people; empty if they can.

    Args:
        objects: the protected objects.
        unit: number of ranks in one replica.
        world: number of ranks in the present world.
    """
    protected = list(objects)
    reasons = [_refusal_of(mesh, unit, world) for mesh in _known()]
    reasons += [_refusal_of_shards(tensor, unit, world) for tensor in _dtensors(protected)]
    reasons += [_refusal_of_info(info, unit, world) for info in _infos(protected)]
    reasons += [_refusal_of_ddp(module.process_group, unit, world) for module in ddp.replicas(protected)]
    return next((reason for reason in reasons if reason), "")


def resize(objects: Iterable[object], *, unit: int, before: int, world: int, rank: int) -> None:
    """Adapt all meshes to the world, or to this worker's rank in it. The groups must already be formed in that world.

    Args:
        objects: the protected objects.
        unit: number of ranks in one replica.
        before: number of ranks in the world for which the meshes were made.
        world: number of ranks in the present world.
        rank: this worker's rank in it.

    Raises:
        StateError: a mesh cannot be adapted; `refusal` has reported it before.
    """
    protected, meshes = list(objects), _known()
    if before != world:
        reason = next((said for mesh in meshes if (said := _refusal_of(mesh, unit, before))), "")
        if reason:
            raise StateError(reason, hint=_HINT)
    spans = {id(mesh): _spans(mesh) for mesh in meshes}
    for root in [mesh for mesh in meshes if mesh._get_root_mesh() is mesh]:
        family = [mesh for mesh in meshes if mesh._get_root_mesh() is root]
        if not _is_across(root, unit, before):
            _rename(family, root._rank_map + (rank // unit - root._rank // unit) * unit)
        elif before != world:
            _lengthen(root, family, spans, before=before, world=world)
    for mesh in meshes:
        mesh._rank, mesh._hash = rank, None
        mesh._coordinate_on_dim = mesh._compute_coordinate_on_dim()
    _work_out_anew(protected)


# --- properties of a mesh ------------------------------------------------------------------------------------------


def _known() -> list[DeviceMesh]:
    """All existing meshes, root meshes before those derived from them."""
    return [mesh for known in list(_KNOWN) if (mesh := known()) is not None and hasattr(mesh, "_dim_group_names")]


def _has_groups(mesh: DeviceMesh) -> bool:
    """False once a group of the mesh was destroyed: torch's caches may keep a mesh that its script is done with."""
    try:
        mesh.get_all_groups()
    except RuntimeError:
        return False
    return True


def _inner(root: DeviceMesh) -> int:
    """Number of ranks at each index of a root's first dimension."""
    return math.prod(root.shape[1:])


def _spans(mesh: DeviceMesh) -> tuple[bool, ...]:
    """For each dimension of a mesh, whether it contains the first dimension of the mesh's root.

    If the root's first dimension has length 1, no layout shows this: names do, and the earlier result.
    """
    root, kept = mesh._get_root_mesh(), getattr(mesh, _SPANS, None)
    if mesh is root:
        return (True, *(False for _ in mesh.shape[1:]))
    if kept is None and root.shape[0] > 1:
        kept = tuple(_extent(axis) >= _inner(root) for axis in mesh._layout)
    if kept is None:
        kept = tuple(_names_first(root, name) for name in mesh.mesh_dim_names or ())
    setattr(mesh, _SPANS, kept)
    return tuple(kept)


def _extent(axis: Any) -> int:
    """Largest index into the rank map that a dimension reaches, starting from 0."""
    return sum((size - 1) * stride for size, stride in axis.sizes_and_strides)


def _names_first(root: DeviceMesh, name: str) -> bool:
    names = root.mesh_dim_names or ()
    flat = root._flatten_mapping.get(name)
    return name == names[0] if name in names or flat is None else any(_spans(flat))


def _is_whole(root: DeviceMesh, world: int) -> bool:
    return sorted(root._flatten_rank_map) == list(range(world))


def _is_across(root: DeviceMesh, unit: int, world: int) -> bool:
    """True if the first dimension of a root counts replicas, or places and replicas."""
    return bool(_across(root, unit, world))


def _across(root: DeviceMesh, unit: int, world: int) -> bool | None:
    """As `_is_across`; None if that cannot be known, because there is only one replica yet."""
    kept: bool | None = getattr(root, _ACROSS, None)
    if kept is None and not _is_whole(root, world):
        kept = False
    elif kept is None and (world > unit or _inner(root) == unit):
        kept = True
    setattr(root, _ACROSS, kept)
    return kept


def _refusal_of(mesh: DeviceMesh, unit: int, world: int) -> str:
    root, ranks = mesh._get_root_mesh(), mesh._get_root_mesh()._flatten_rank_map
    what = f"the mesh {mesh} of ranks {list(ranks)}"
    if not _CAN_FOLLOW:
        return f"torch {torch.__version__} keeps {what} in a way that this version of regrow does not know"
    across = _across(root, unit, world)
    if across is None:
        return f"{what} could be of all replicas or of one: there is only one, and no first dimension that counts it"
    if not across:
        here = root._rank // unit
        return "" if {rank // unit for rank in ranks} == {here} else f"{what} is neither of the world nor of a replica"
    inner = _inner(root)
    rows = [ranks[at : at + inner] for at in range(0, world, inner)]
    if any(row != tuple(rank + at * inner for rank in rows[0]) for at, row in enumerate(rows)):
        return f"{what} does not number its ranks along its first dimension"
    if unit % inner:
        return f"{what} has {inner} ranks for each place along its first dimension, and a replica has {unit}"
    mixed = [axis for axis, spans in zip(mesh._layout, _spans(mesh), strict=True) if spans and not _grows(axis, root)]
    return f"{what} has a part of the dimension that counts replicas" if mixed else ""


def _grows(axis: Any, root: DeviceMesh) -> bool:
    """True if a dimension contains all of the root's first dimension, as its outermost part."""
    inner, length = _inner(root), root.shape[0]
    if length == 1:
        return True
    size, stride = next(iter(axis.sizes_and_strides))
    return bool(size * stride == length * inner and inner % min(stride, inner) == 0)


def _counts_replicas(mesh: DeviceMesh, at: int, unit: int, world: int) -> bool:
    return _is_across(mesh._get_root_mesh(), unit, world) and _spans(mesh)[at]


def _refusal_of_shards(tensor: DTensor, unit: int, world: int) -> str:
    mesh = tensor.device_mesh
    sharded = [at for at, placement in enumerate(tensor.placements) if not isinstance(placement, Replicate)]
    if any(_counts_replicas(mesh, at, unit, world) for at in sharded):
        return f"a tensor of shape {list(tensor.shape)} is sharded over replicas, by the first dimension of {mesh}"
    return ""


def _refusal_of_info(info: Any, unit: int, world: int) -> str:
    mesh, replicate = info.mesh, info.replicate_mesh_dim
    if replicate is None or _counts_replicas(mesh, replicate, unit, world):
        return ""
    return f"FSDP replicates over dimension {replicate} of {mesh}, which does not count replicas"


def _refusal_of_ddp(group: dist.ProcessGroup, unit: int, world: int) -> str:
    ranks = dist.get_process_group_ranks(group)
    known = any(group is each for each in [dist.group.WORLD, *follows(unit=unit, world=world)])
    if known or (world > unit and {rank // unit for rank in ranks} == set(range(world // unit))):
        return ""
    return f"DDP reduces over the ranks {ranks}, which are not those of all replicas of {unit} ranks"


# --- changing a mesh -----------------------------------------------------------------------------------------------


def _lengthen(
    root: DeviceMesh, family: list[DeviceMesh], spans: dict[int, tuple[bool, ...]], *, before: int, world: int
) -> None:
    """Give the first dimension of a root mesh, and dimensions derived from it, the length for `world` ranks."""
    inner = _inner(root)
    rows = [root._rank_map[:inner] + start for start in range(0, world, inner)]
    for mesh in family:
        axes = [
            _other_length(axis, inner, before // inner, world // inner) if spanning else axis
            for axis, spanning in zip(mesh._layout, spans[id(mesh)], strict=True)
        ]
        mesh._layout = type(mesh._layout)(axes)
    _rename(family, torch.cat(rows))


def _other_length(axis: Any, inner: int, before: int, after: int) -> Any:
    """A dimension whose outermost part, the root's first dimension, has another length."""
    parts = list(axis.sizes_and_strides)
    if before > 1:
        size, stride = parts.pop(0)
        # torch joins neighbouring parts into one.
        parts[:0] = [(size // before, stride)] if stride < inner else []
    sizes, strides = zip((after, inner), *parts, strict=True)
    return type(axis)(sizes, strides)


def _rename(family: list[DeviceMesh], rank_map: torch.Tensor) -> None:
    for mesh in family:
        mesh._rank_map = rank_map
        mesh._flatten_rank_map = tuple(rank_map.tolist())


# --- holders of meshes ---------------------------------------------------------------------------------------------


def _infos(objects: list[object]) -> Iterator[Any]:
    """Mesh descriptions that FSDP2 keeps, each once."""
    seen: set[int] = set()
    for group in fsdp.parameter_groups(fsdp.roots(objects)):
        for info in (group.mesh_info, group.post_forward_mesh_info):
            if info is not None and id(info) not in seen:
                seen.add(id(info))
                yield info


def _dtensors(objects: list[object]) -> Iterator[DTensor]:
    """DTensors among the parameters, their gradients, buffers and the state of optimizers."""
    for item in objects:
        tensors: list[Any] = []
        if isinstance(item, nn.Module):
            tensors += [*item.parameters(), *(each.grad for each in item.parameters()), *nn.Module.buffers(item)]
        elif isinstance(item, torch.optim.Optimizer):
            tensors += [value for state in item.state.values() for value in state.values()]
        yield from (each for each in tensors if isinstance(each, DTensor))


def _work_out_anew(objects: list[object]) -> None:
    for info in _infos(objects):
        if info.shard_mesh_dim is not None:
            info.shard_mesh_size = info.mesh.size(info.shard_mesh_dim)
            info.shard_mesh_rank = info.shard_process_group.rank()
        if info.replicate_mesh_dim is not None:
            info.replicate_mesh_size = info.mesh.size(info.replicate_mesh_dim)
            info.replicate_mesh_rank = info.replicate_process_group.rank()
    specs = [tensor._spec for tensor in _dtensors(objects)]
    for group in fsdp.parameter_groups(fsdp.roots(objects)):
        for parameter in group.fsdp_params:
            specs += [value for value in vars(parameter).values() if isinstance(value, DTensorSpec)]
    for spec in specs:
        spec._hash = None
    if specs:
        debug._clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
