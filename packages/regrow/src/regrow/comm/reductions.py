"""The reductions of `torch.distributed` on tensors in host memory.

AVG is the sum divided by the number of ranks; for integers it is rounded towards zero, as in NCCL. PREMUL_SUM
multiplies each rank's tensor by its factor before it is added.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import ReduceOp

from regrow.core.errors import CollectiveMisuse

Combine = Callable[[torch.Tensor, torch.Tensor], Any]
_KINDS: Any = ReduceOp.RedOpType
_COMBINES: dict[int, Combine] = {
    int(_KINDS.SUM): torch.Tensor.add_,
    int(_KINDS.AVG): torch.Tensor.add_,
    int(_KINDS.PREMUL_SUM): torch.Tensor.add_,
    int(_KINDS.PRODUCT): torch.Tensor.mul_,
    int(_KINDS.MIN): lambda left, right: torch.minimum(left, right, out=left),
    int(_KINDS.MAX): lambda left, right: torch.maximum(left, right, out=left),
    int(_KINDS.BAND): torch.Tensor.bitwise_and_,
    int(_KINDS.BOR): torch.Tensor.bitwise_or_,
    int(_KINDS.BXOR): torch.Tensor.bitwise_xor_,
}
_AVG, _PREMUL_SUM = int(_KINDS.AVG), int(_KINDS.PREMUL_SUM)
_NAMES: dict[int, str] = {int(kind): name for name, kind in _KINDS.__members__.items()}
_BITWISE = {int(_KINDS.BAND), int(_KINDS.BOR), int(_KINDS.BXOR)}
_OF_REAL = {int(_KINDS.MIN), int(_KINDS.MAX), int(_KINDS.PRODUCT)}
"""Reductions that gloo refuses for complex numbers."""


def number(op: Any) -> int:
    """Torch's number of a reduction that is given with or without a factor."""
    return int(op.op if hasattr(op, "op") else op)


def name(kind: int) -> str:
    """Torch's name of the reduction with this number."""
    return _NAMES.get(kind, str(kind))


def factor(op: Any) -> Any:
    """Factor by which each rank's tensor is multiplied before the sum; None if there is none."""
    if number(op) != _PREMUL_SUM or not hasattr(op, "op"):
        return None
    kept: tuple[Any, Any] = op.__getstate__()  # as torch itself sends it to another process
    return kept[1]


def combine(kind: int) -> Combine:
    """The function that reduces its right tensor into its left one in place. `kind`: the reduction's number."""
    return _COMBINES[kind]


def prepare(kind: int, op: Any, flat: torch.Tensor) -> None:
    """Prepare this rank's tensor in place for the reduction. `kind`: the number of `op`."""
    by = factor(op) if kind == _PREMUL_SUM else None
    if by is not None:
        flat.mul_(by.to(flat.dtype).reshape(-1) if isinstance(by, torch.Tensor) else by)


def finish(kind: int, flat: torch.Tensor, size: int) -> None:
    """Finish a reduction in place once all ranks' tensors are reduced. `kind`: the reduction's number."""
    if kind == _AVG:
        whole = not (flat.is_floating_point() or flat.is_complex())
        flat.div_(size, rounding_mode="trunc" if whole else None)


def check(op: Any, tensor: torch.Tensor) -> None:
    """Check that a tensor can be reduced by `op`. Raises `CollectiveMisuse`."""
    kind, dtype = number(op), tensor.dtype
    asked = f"{name(kind)} of {str(dtype).removeprefix('torch.')}"
    if kind not in _COMBINES:
        raise CollectiveMisuse(f"the reduction {name(kind)} is not known", hint="use SUM, AVG, PRODUCT, MIN or MAX")
    if tensor.is_sparse:
        if name(kind) != "SUM":
            raise CollectiveMisuse(f"{asked} cannot be had of sparse tensors", hint="they can be summed: use SUM")
        return
    if kind in _BITWISE and (dtype.is_floating_point or dtype.is_complex):
        raise CollectiveMisuse(f"{asked} cannot be had", hint="bitwise reductions are for integers and booleans")
    if kind in _OF_REAL and dtype.is_complex:
        raise CollectiveMisuse(f"{asked} cannot be had", hint="complex numbers can be summed and averaged")
    if kind in (_AVG, _PREMUL_SUM) and dtype is torch.bool:
        raise CollectiveMisuse(f"{asked} cannot be had", hint="booleans can be reduced by MIN, MAX, BAND and BOR")
    by = factor(op)
    if isinstance(by, torch.Tensor) and by.numel() != 1:
        raise CollectiveMisuse(f"PREMUL_SUM has a factor of {by.numel()} elements", hint="give it one number")
    if by is not None and not (dtype.is_floating_point or dtype.is_complex):
        raise CollectiveMisuse(f"{asked} cannot be had", hint="a factor is for floating-point numbers")
