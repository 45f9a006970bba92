"""FSDP2's gradients of single micro-batches: taken after each backward, given back as a sum.

With its all-reduce switched off, a backward of HSDP ends with the sum over the ranks of the shard dimension. FSDP keeps
it in one flat tensor for each of its parameter groups, to add the next sum to it; it is taken from FSDP before that.
Without a replicate dimension the sum is in the sharded parameters' gradients.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from regrow.comm.torch_private.fsdp import groups_of
from regrow.core.errors import StateError, UsageError
from regrow.hydration.shards import local


class ShardSums:
    """The gradients of one of FSDP's parameter groups."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._parameters = [each for each in group.fsdp_params if each.sharded_param.requires_grad]
        if any(each.offload_to_cpu for each in self._parameters):
            raise UsageError("FSDP offloads parameters to the CPU", hint="invariant mode needs them on their device")

    @property
    def replicas(self) -> dist.ProcessGroup | None:
        """The group of the replicate dimension; None without one."""
        group: dist.ProcessGroup | None = getattr(self._group.mesh_info, "replicate_process_group", None)
        return group

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The sharded parameters of these gradients."""
        return [each.sharded_param for each in self._parameters]

    def take(self) -> list[torch.Tensor]:
        """Remove and return the gradients of the last backward, as flat tensors."""
        if self.replicas is None:
            return [self._taken(each.sharded_param) for each in self._parameters]
        flat, self._group._partial_reduce_output = self._group._partial_reduce_output, None
        length = sum(each.padded_sharded_param_size.numel() for each in self._parameters)
        if flat is None:
            like = local(self._parameters[0].sharded_param)
            return [torch.zeros(length, dtype=self._group._reduce_dtype or like.dtype, device=like.device)]
        if flat.numel() != length:
            raise StateError(
                f"FSDP reduced {flat.numel()} elements of a group that has {length}",
                hint="every micro-batch must use the same parameters in this version of torch",
            )
        return [flat]

    @staticmethod
    def _taken(parameter: torch.Tensor) -> torch.Tensor:
        gradient, parameter.grad = parameter.grad, None
        return (torch.zeros_like(local(parameter)) if gradient is None else local(gradient)).reshape(-1)

    def put(self, sums: list[torch.Tensor]) -> None:
        """Make these sums the gradients of the parameters."""
        if self.replicas is None:
            for each, flat in zip(self._parameters, sums, strict=True):
                each.sharded_param.grad = each.to_sharded_dtensor(flat.view(each.sharded_size))
            return
        # From torch 2.15 on a group's parameters may differ in dtype, so each parameter has a tensor of its own.
        dtype = getattr(self._group, "_orig_dtype", None) or getattr(self._parameters[0], "orig_dtype", None)
        flat, at = sums[0].to(dtype or sums[0].dtype), 0
        for each in self._parameters:
            piece = torch.as_strided(flat, each.sharded_size, each.contiguous_sharded_stride, storage_offset=at)
            each.sharded_param.grad = each.to_sharded_dtensor(piece)
            at += each.padded_sharded_param_size.numel()


def prepare(modules: Iterable[FSDPModule], shard_size: int) -> None:
    """Make every backward end with the mean over the shard dimension, whatever the number of replicas."""
    for root in modules:
        root.set_requires_gradient_sync(True)
        root.set_requires_all_reduce(False)
        for module in root.modules():  # type: ignore[attr-defined]
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(float(shard_size))
                if hasattr(module, "set_reduce_scatter_unused_params"):
                    module.set_reduce_scatter_unused_params(True, recurse=False)


def sums_of(modules: Iterable[FSDPModule]) -> list[ShardSums]:
    """The `ShardSums` of each parameter group that trains, in the same order on all ranks; only after a forward."""
    found = [ShardSums(group) for root in modules for group in groups_of(root) if group.fsdp_params]
    return [sums for sums in found if sums.parameters]
