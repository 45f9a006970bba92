"""Checks of a collective's arguments on the calling thread, before anything is sent.

An error found here breaks no connection, and its traceback shows the caller's own line. Errors that only the peers'
calls reveal are found by `regrow.comm.headers`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed import ReduceOp

from regrow.comm import reductions
from regrow.core.errors import CollectiveMisuse

SUM = ReduceOp.SUM


def check(name: str, args: tuple[Any, ...], options: dict[str, Any], size: int) -> None:
    """Check that `ProcessGroup.name(*args)` is valid in a group of `size` ranks. Raises `CollectiveMisuse`."""
    judge, tensors = _JUDGES.get(name, (None, 0))
    if name not in ("allreduce", "allreduce_coalesced"):
        for tensor in _tensors((*args, *options.values())):
            if tensor.is_sparse:
                raise CollectiveMisuse(
                    f"{name} of a sparse tensor is not supported", hint="only all_reduce is; call to_dense() before"
                )
    if judge is not None and len(args) >= tensors:
        judge(name, args, options, size)


def _tensors(value: Iterable[Any]) -> Iterator[torch.Tensor]:
    for item in value:
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, list | tuple):
            yield from _tensors(item)


def _option(name: str, at: int, args: tuple[Any, ...], options: dict[str, Any], fallback: Any) -> Any:
    opts = options.get("opts", args[at] if len(args) > at else None)
    return fallback if opts is None else getattr(opts, name)


def _root(name: str, at: int, args: tuple[Any, ...], options: dict[str, Any], size: int) -> int:
    root = int(_option("rootRank", at, args, options, 0))
    if not 0 <= root < size:
        raise CollectiveMisuse(f"{name}: rank {root} is not in a group of {size}", hint="the root is one of its ranks")
    return root


def _fits(name: str, what: str, has: int, wanted: int, why: str) -> None:
    if has != wanted:
        raise CollectiveMisuse(f"{name}: {what} has {has} elements where {wanted} are needed", hint=why)


def _alike(name: str, one: torch.Tensor, other: torch.Tensor) -> None:
    if one.dtype != other.dtype:
        raise CollectiveMisuse(
            f"{name}: its tensors are of {_of(one)} and of {_of(other)}", hint="give both the same dtype"
        )


def _of(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _all_reduce(name: str, args: tuple[Any, ...], options: dict[str, Any], size: int) -> None:
    op = _option("reduceOp", 1, args, options, SUM)
    for tensor in args[0]:
        reductions.check(op, tensor)


def _reduce(name: str, args: tuple[Any, ...], options: dict[str, Any], size: int) -> None:
    _all_reduce(name, args, options, size)
    _root(name, 1, args, options, size)


def _broadcast(name: str, args: tuple[Any, ...], options: dict[str, Any], size: int) -> None:
    _root(name, 1, args, options, size)


def _all_gather(name: str, args: tuple[Any, ...], options: dict[str, Any], size: int) -> None:
    outputs, inputs = args[0], args[1]
    if name == "allgather_coalesced":
        outputs = [list(of_all) for of_all in zip(*outputs, strict=True)]
    for row, given in zip(outputs, inputs, strict=True):
        _row(name, row, given, size)


def _row(name: str, row: Sequence[torch.Tensor], given: torch.Tensor, size: int) -> None:
    if len(row) != size:
        raise CollectiveMisuse(f"{name}: {len(row)} tensors for {size} ranks", hint="give one for each rank")
    for tensor in row:
        _alike(name, tensor, given)
    if all(tensor.numel() == row[0].numel() for tensor in row):
        _fits(name, "an output", row[0].numel(), given.numel(), "the outputs must be of the input's size")


def _gather(name: str, args: tuple[Any, ...], options: dict[str, Any], size: int) -> None:
    _root(name, 2, args, options, size)
    if args[0]:
        _all_gather(name, args, options, size)


def _scatter(name: str, args: tuple[Any, ...], options: dict[str, Any], size: int) -> None:
    _root(name, 2, args, options, size)
    if args[1]:
        for output, row in zip(args[0], args[1], strict=True):
            _row(name, row, output, size)


def _gather_into(name: str, args: tuple[Any, ...], options: dict[str, Any], size: int) -> None:
    for output, given in _pairs(args):
        _alike(name, output, given)
        _fits(name, "the output", output.numel(), size * given.numel(), "it must hold the input of every rank")


def _scatter_from(name: str, args: tuple[Any, ...], options: dict[str, Any], size: int) -> None:
    op = _option("reduceOp", 2, args, options, SUM)
    for output, given in _pairs(args):
        reductions.check(op, given)
        _alike(name, output, given)
        _fits(name, "the input", given.numel(), size * output.numel(), "it must hold a part for every rank")


def _reduce_scatter(name: str, args: tuple[Any, ...], options: dict[str, Any], size: int) -> None:
    op = _option("reduceOp", 2, args, options, SUM)
    for output, row in zip(args[0], args[1], strict=True):
        for part in row:
            reductions.check(op, part)
        _row(name, row, output, size)


def _pairs(args: tuple[Any, ...]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    if isinstance(args[0], torch.Tensor):
        yield args[0], args[1]
    else:
        yield from zip(args[0], args[1], strict=True)


def _all_to_all(name: str, args: tuple[Any, ...], options: dict[str, Any], size: int) -> None:
    for what, tensors in (("outputs", args[0]), ("inputs", args[1])):
        if len(tensors) != size:
            raise CollectiveMisuse(f"{name}: {len(tensors)} {what} for {size} ranks", hint="give one for each rank")


def _all_to_all_single(name: str, args: tuple[Any, ...], options: dict[str, Any], size: int) -> None:
    output, given, out_splits, in_splits = args[:4]
    _alike(name, output, given)
    for what, tensor, splits in (("output", output, out_splits), ("input", given, in_splits)):
        rows = len(tensor) if tensor.dim() else 1
        if splits and (len(splits) != size or sum(splits) != rows):
            raise CollectiveMisuse(
                f"{name}: the {what} has {rows} rows, its splits for {size} ranks are {list(splits)}",
                hint="give a split for each rank; together they are all rows",
            )
        if not splits and tensor.numel() % size:
            raise CollectiveMisuse(
                f"{name}: {tensor.numel()} elements cannot be dealt out to {size} ranks", hint="pad the tensor"
            )


Judge = Callable[[str, tuple[Any, ...], dict[str, Any], int], None]
_JUDGES: dict[str, tuple[Judge, int]] = {
    "allreduce": (_all_reduce, 1),
    "allreduce_coalesced": (_all_reduce, 1),
    "reduce": (_reduce, 1),
    "broadcast": (_broadcast, 1),
    "allgather": (_all_gather, 2),
    "allgather_coalesced": (_all_gather, 2),
    "gather": (_gather, 2),
    "scatter": (_scatter, 2),
    "_allgather_base": (_gather_into, 2),
    "all_gather_single": (_gather_into, 2),
    "allgather_into_tensor_coalesced": (_gather_into, 2),
    "all_gather_single_coalesced": (_gather_into, 2),
    "reduce_scatter": (_reduce_scatter, 2),
    "_reduce_scatter_base": (_scatter_from, 2),
    "reduce_scatter_single": (_scatter_from, 2),
    "reduce_scatter_tensor_coalesced": (_scatter_from, 2),
    "reduce_scatter_single_coalesced": (_scatter_from, 2),
    "alltoall": (_all_to_all, 2),
    "alltoall_base": (_all_to_all_single, 4),
    "all_to_all_single": (_all_to_all_single, 4),
}
"""For each method: its check, and the number of positional arguments that the check needs."""
