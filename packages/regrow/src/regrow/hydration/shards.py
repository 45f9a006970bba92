"""Tensors of which a rank has only a piece: the local values, and their place in the whole tensor.

`DTensor`s are accessed as `torch.distributed.checkpoint` accesses them, so names and boxes are those of checkpoints.
"""

from typing import Any, cast

import torch

from regrow.core.errors import StateError

Box = tuple[tuple[int, int], ...]
"""Start and stop in each dimension of the whole tensor."""


def is_distributed(tensor: torch.Tensor) -> bool:
    """True if a rank may have only a piece of the tensor. Imports nothing that a plain script does not need."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Local part of a tensor, sharing the tensor's memory; a plain tensor is returned itself."""
    return cast(torch.Tensor, cast(Any, tensor.detach()).to_local()) if is_distributed(tensor) else tensor


def box_of(tensor: torch.Tensor, name: str = "a tensor") -> Box | None:
    """Box of the local piece in the whole tensor; None for a plain tensor.

    Raises:
        StateError: the local part is a summand instead of a piece, or there are several pieces.
    """
    if not is_distributed(tensor):
        return None
    distributed = cast(Any, tensor)
    if any(placement.is_partial() for placement in distributed.placements):
        raise StateError(
            f"{name} is a DTensor with placements {distributed.placements}, a sum that was not reduced",
            hint="redistribute it to Shard or Replicate before it is protected",
        )
    chunks = distributed.__create_chunk_list__()
    if not chunks:
        return tuple((0, 0) for _ in tensor.shape)
    if len(chunks) > 1:
        raise StateError(f"{name} is a DTensor of which this rank has {len(chunks)} pieces; one can be protected")
    chunk = chunks[0]
    return tuple((start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))


def empty_like(
    tensor: torch.Tensor, *, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> torch.Tensor:
    """A new tensor, distributed in the same way, with undefined values and without a gradient."""
    return torch.empty_like(tensor.detach(), dtype=dtype, device=device)
