"""The names that regrow uses and torch does not promise to keep. They exist in torch 2.11 to 2.15.

They are checked when a worker's groups are made, so that a missing one is reported before the training, and not by an
`AttributeError` in the middle of a recovery.
"""

import functools
import importlib
from collections.abc import Mapping

import torch

from regrow.core.errors import UsageError

_C10D = "torch.distributed.distributed_c10d"
_DDP = "torch.nn.parallel.DistributedDataParallel"
_FSDP = "torch.distributed.fsdp._fully_shard"

NAMES = (
    "torch._C._distributed_c10d.ProcessGroup._register_backend",
    "torch._C._distributed_c10d.ProcessGroup._set_default_backend",
    "torch._C._dynamo.eval_frame.set_code_exec_strategy",
    "torch._C._dynamo.eval_frame._FrameExecStrategy",
    "torch._C._dynamo.eval_frame._FrameAction",
    f"{_C10D}.Backend._plugins",
    f"{_C10D}.Backend.default_device_backend_map",
    f"{_C10D}._DistributedBackendOptions",
    f"{_C10D}._coalescing_manager",
    f"{_C10D}._new_process_group_helper",
    f"{_C10D}._set_pg_timeout",
    f"{_C10D}._tensor_to_object",
    f"{_C10D}._world.pg_coalesce_state",
    f"{_C10D}._world.pg_group_ranks",
    f"{_C10D}._world.pg_map",
    f"{_DDP}._get_ddp_logging_data",
    f"{_DDP}._sync_buffers",
    "torch._C._distributed_c10d.Reducer._check_reducer_finalized",
    "torch._C._distributed_c10d.Reducer._rebuild_buckets",
    "torch._C._distributed_c10d.Reducer._reset_state",
    "torch.distributed.fsdp.FSDPModule._get_fsdp_state",
    "torch.multiprocessing.reductions.StorageWeakRef",
    f"{_FSDP}._fsdp_param_group.FSDPParamGroup",
)
"""Dotted paths, each from an importable module. Names that only instances of FSDP have cannot be checked here."""

_KEEPS_ITS_SIZE = "the world of a job with device meshes keeps its size"
LESS = {
    "torch.distributed._mesh_layout._FlatLayout": _KEEPS_ITS_SIZE,
    "torch.distributed.device_mesh.DeviceMesh._init_one_process_group": _KEEPS_ITS_SIZE,
}
"""Names that some of these versions lack, each with the limitation of a job without it."""


def missing(names: tuple[str, ...] = NAMES) -> list[str]:
    """The names that this torch does not have."""
    return [name for name in names if not _has(name)]


def _has(name: str) -> bool:
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        return functools.reduce(lambda at, part: getattr(at, part, None), parts[count:], found) is not None
    return False


def check() -> None:
    """Raise `UsageError` if this torch lacks a name, so that it is no version with which regrow was tested."""
    lacking = missing()
    if lacking:
        raise UsageError(
            f"torch {torch.__version__} has no {', '.join(lacking)}, which regrow uses",
            hint="install a version that regrow was run with: docs/torch-versions.md",
        )


def shortfalls(less: Mapping[str, str] = LESS) -> str:
    """One sentence on the limitations of a job with this torch, for people; empty if there are none."""
    lacking = missing(tuple(less))
    if not lacking:
        return ""
    names = ", ".join(name.rpartition(".")[2] for name in lacking)
    reported = "; ".join(dict.fromkeys(less[name] for name in lacking))
    return f"torch {torch.__version__} has no {names}: {reported}"
