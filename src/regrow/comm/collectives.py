"""The collectives of `torch.distributed` over a `Mesh`, for tensors in the processor's memory.

Reductions are direct: every rank owns a part of the elements, receives that part from all others, adds in the order of
ranks, and sends the sum back. Each element is summed by one rank in one order, so all ranks get the same bits, whatever
arrives first. Two rounds, and the volume of a ring.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed import ReduceOp

from regrow.comm.mesh import POINT_TO_POINT, Mesh
from regrow.core.errors import UsageError
from regrow.core.ids import Seconds
from regrow.step.dealing import Span, fold, partial_nodes_of_all

PIECE_BYTES = 16 << 20
"""A large tensor is reduced in pieces of this size, which bounds the memory for what arrives."""
SMALL_BYTES = 16 << 10
"""Up to this, everybody sends everything to everybody: one round instead of two."""

Combine = Callable[[torch.Tensor, torch.Tensor], Any]
_COMBINES: dict[Any, Combine] = {
    ReduceOp.SUM: torch.Tensor.add_,
    ReduceOp.AVG: torch.Tensor.add_,
    ReduceOp.PRODUCT: torch.Tensor.mul_,
    ReduceOp.MIN: lambda left, right: torch.minimum(left, right, out=left),
    ReduceOp.MAX: lambda left, right: torch.maximum(left, right, out=left),
    ReduceOp.BAND: torch.Tensor.bitwise_and_,
    ReduceOp.BOR: torch.Tensor.bitwise_or_,
    ReduceOp.BXOR: torch.Tensor.bitwise_xor_,
}


def _view(tensor: torch.Tensor) -> memoryview:
    """A flat contiguous tensor's own bytes."""
    data: memoryview = tensor.view(torch.uint8).numpy().data
    return data


class Collectives:
    """Runs one collective after another, in the order in which they are called, which is the same on all ranks.

    Args:
        mesh: the connections.
        deadline: how long one collective may take, in seconds.
    """

    def __init__(self, mesh: Mesh, deadline: Seconds) -> None:
        self._mesh, self._deadline = mesh, deadline
        self._rank, self._size = mesh.rank, mesh.size
        self._others = [peer for peer in range(mesh.size) if peer != mesh.rank]
        self._receiving = {peer: threading.Lock() for peer in self._others}
        self._scratch = torch.empty(0, dtype=torch.uint8)

    # --- reductions --------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor, op: Any) -> None:
        """Reduce over all ranks, in place."""
        combine = _combine(op)
        flat = _flat(tensor)
        if flat.nbytes <= SMALL_BYTES or flat.numel() < self._size:
            self._reduce_whole(flat, combine)
        else:
            step = max(self._size, PIECE_BYTES // flat.element_size())
            for start in range(0, flat.numel(), step):
                self._reduce_piece(flat[start : start + step], combine)
        if op == ReduceOp.AVG:
            flat.div_(self._size)
        _put(tensor, flat)

    def _reduce_whole(self, flat: torch.Tensor, combine: Combine) -> None:
        parts = self._room(flat, len(self._others))
        mine = flat.clone()
        self._exchange(dict.fromkeys(self._others, mine), dict(zip(self._others, parts, strict=True)))
        self._combine_in_order(flat, mine, dict(zip(self._others, parts, strict=True)), combine)

    def _reduce_piece(self, flat: torch.Tensor, combine: Combine) -> None:
        bounds = [flat.numel() * at // self._size for at in range(self._size + 1)]
        owned = [flat[bounds[at] : bounds[at + 1]] for at in range(self._size)]
        mine = owned[self._rank]
        parts = dict(zip(self._others, self._room(mine, len(self._others)), strict=True))
        self._exchange({peer: owned[peer] for peer in self._others}, parts)
        self._combine_in_order(mine, mine, parts, combine)
        self._exchange(dict.fromkeys(self._others, mine), {peer: owned[peer] for peer in self._others})

    def _combine_in_order(
        self, into: torch.Tensor, mine: torch.Tensor, parts: dict[int, torch.Tensor], combine: Combine
    ) -> None:
        total = mine if self._rank == 0 else parts[0]
        for rank in range(1, self._size):
            combine(total, mine if rank == self._rank else parts[rank])
        if total.data_ptr() != into.data_ptr():
            into.copy_(total)

    def reduce_scatter(self, output: torch.Tensor, parts: Sequence[torch.Tensor], op: Any) -> None:
        """`output` becomes the reduction of every rank's `parts[rank]`."""
        combine = _combine(op)
        mine = _flat(parts[self._rank]).clone()
        arrived = dict(zip(self._others, self._room(mine, len(self._others)), strict=True))
        self._exchange({peer: _flat(parts[peer]) for peer in self._others}, arrived)
        total = torch.empty_like(mine)
        self._combine_in_order(total, mine, arrived, combine)
        if op == ReduceOp.AVG:
            total.div_(self._size)
        _put(output, total)

    def reduce(self, tensor: torch.Tensor, root: int, op: Any) -> None:
        """Reduce onto `root`; the others' tensors stay as they are."""
        work = tensor.detach().clone()
        self.all_reduce(work, op)
        if self._rank == root:
            tensor.copy_(work)

    def tree_reduce(self, nodes: Sequence[torch.Tensor], count: int, scale: float) -> None:
        """Sum over the micro-batches of all ranks in the one tree over `count` of them; into the first of `nodes`.

        Args:
            nodes: this rank's partial nodes in order: flat, of one size and dtype. All of them are written to.
            count: micro-batches of all ranks, dealt out to them by rank (`regrow.step.dealing`).
            scale: what the sum is multiplied by.
        """
        held = partial_nodes_of_all(count, self._size)
        step = max(self._size, PIECE_BYTES // nodes[0].element_size())
        for start in range(0, nodes[0].numel(), step):
            pieces = [node[start : start + step] for node in nodes]
            self._tree_reduce_piece(pieces, held, count, scale)

    def _tree_reduce_piece(
        self, nodes: Sequence[torch.Tensor], held: Sequence[Sequence[Span]], count: int, scale: float
    ) -> None:
        bounds = [nodes[0].numel() * at // self._size for at in range(self._size + 1)]

        def owned(node: torch.Tensor, rank: int) -> torch.Tensor:
            return node[bounds[rank] : bounds[rank + 1]]

        mine = owned(nodes[0], self._rank)
        found = {span: owned(node, self._rank) for span, node in zip(held[self._rank], nodes, strict=True)}
        room = iter(self._room(mine, sum(len(held[peer]) for peer in self._others)))
        for at in range(max(map(len, held))):
            out = {peer: owned(nodes[at], peer) for peer in self._others} if at < len(nodes) else {}
            into = {peer: next(room) for peer in self._others if at < len(held[peer])}
            found.update({held[peer][at]: part for peer, part in into.items()})
            self._exchange(out, into)
        total = fold(count, found, torch.Tensor.add_)
        if scale != 1.0:
            total.mul_(scale)
        if total.data_ptr() != mine.data_ptr():
            mine.copy_(total)
        self._exchange(dict.fromkeys(self._others, mine), {peer: owned(nodes[0], peer) for peer in self._others})

    # --- copies ------------------------------------------------------------------------------------------------

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """All ranks get the root's values."""
        flat = _flat(tensor)
        if self._rank == root:
            self._exchange(dict.fromkeys(self._others, flat), {})
        else:
            self._exchange({}, {root: flat})
            _put(tensor, flat)

    def all_gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        """`outputs[r]` becomes rank r's tensor."""
        mine = _flat(tensor)
        flats = {peer: _flat(outputs[peer]) for peer in self._others}
        self._exchange(dict.fromkeys(self._others, mine), flats)
        for peer, flat in flats.items():
            _put(outputs[peer], flat)
        outputs[self._rank].copy_(tensor.reshape(outputs[self._rank].shape))

    def gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, root: int) -> None:
        """On the root, `outputs[r]` becomes rank r's tensor."""
        if self._rank != root:
            self._exchange({root: _flat(tensor)}, {})
            return
        flats = {peer: _flat(outputs[peer]) for peer in self._others}
        self._exchange({}, flats)
        for peer, flat in flats.items():
            _put(outputs[peer], flat)
        outputs[root].copy_(tensor)

    def scatter(self, output: torch.Tensor, parts: Sequence[torch.Tensor], root: int) -> None:
        """`output` becomes the root's `parts[rank]`."""
        if self._rank == root:
            self._exchange({peer: _flat(parts[peer]) for peer in self._others}, {})
            output.copy_(parts[root])
            return
        flat = _flat(output)
        self._exchange({}, {root: flat})
        _put(output, flat)

    def all_to_all(self, outputs: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> None:
        """`outputs[r]` becomes rank r's `parts[rank]`."""
        flats = {peer: _flat(outputs[peer]) for peer in self._others}
        self._exchange({peer: _flat(parts[peer]) for peer in self._others}, flats)
        for peer, flat in flats.items():
            _put(outputs[peer], flat)
        outputs[self._rank].copy_(parts[self._rank])

    def barrier(self) -> None:
        """Wait for all ranks."""
        mark = torch.zeros(1, dtype=torch.uint8)
        self._exchange(dict.fromkeys(self._others, mark), {peer: torch.empty_like(mark) for peer in self._others})

    # --- point to point ----------------------------------------------------------------------------------------

    def send(self, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> None:
        """Send tensors to one peer, which receives in the same order."""
        for tensor in tensors:
            flat = _flat(tensor)
            head = torch.tensor([tag, flat.nbytes], dtype=torch.int64)
            for part in (head, flat):
                self._mesh.exchange({peer: _view(part)}, {}, lane=POINT_TO_POINT, deadline=self._deadline)

    def receive(self, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> None:
        """Receive tensors from one peer. Raises `UsageError` when it sends something else first."""
        with self._receiving[peer]:
            for tensor in tensors:
                self._receive(tensor, peer, tag)

    def _receive(self, tensor: torch.Tensor, peer: int, tag: int) -> None:
        flat = _flat(tensor)
        head = torch.empty(2, dtype=torch.int64)
        self._mesh.exchange({}, {peer: _view(head)}, lane=POINT_TO_POINT, deadline=self._deadline)
        if head.tolist() != [tag, flat.nbytes]:
            raise UsageError(
                f"rank {peer} sent {head[1]} bytes with tag {head[0]}; {flat.nbytes} with tag {tag} were awaited",
                hint="receive in the order of the sends",
            )
        self._mesh.exchange({}, {peer: _view(flat)}, lane=POINT_TO_POINT, deadline=self._deadline)
        _put(tensor, flat)

    def receive_any(self, tensors: Sequence[torch.Tensor], tag: int) -> int:
        """Receive tensors from the first peer that sends and from which nothing is awaited by name; its rank."""
        until = time.monotonic() + self._deadline
        while True:
            free = [peer for peer in self._others if not self._receiving[peer].locked()]
            for peer in self._mesh.await_any(free, lane=POINT_TO_POINT, until=until):
                if self._receiving[peer].acquire(blocking=False):
                    try:
                        for tensor in tensors:
                            self._receive(tensor, peer, tag)
                    finally:
                        self._receiving[peer].release()
                    return peer

    # --- bytes -------------------------------------------------------------------------------------------------

    def _exchange(self, out: dict[int, torch.Tensor], into: dict[int, torch.Tensor]) -> None:
        self._mesh.exchange(
            {peer: _view(tensor) for peer, tensor in out.items()},
            {peer: _view(tensor) for peer, tensor in into.items()},
            deadline=self._deadline,
        )

    def _room(self, like: torch.Tensor, count: int) -> list[torch.Tensor]:
        """`count` tensors of that size and dtype, in memory that is used again."""
        size = -(-like.nbytes // 64) * 64
        if self._scratch.nbytes < size * count:
            self._scratch = torch.empty(size * count, dtype=torch.uint8)
        return [self._scratch[at * size : at * size + like.nbytes].view(like.dtype) for at in range(count)]


def _combine(op: Any) -> Combine:
    for known, combine in _COMBINES.items():
        if op == known:
            return combine
    raise UsageError(f"the reduction {op} is not supported on CPU tensors", hint="use SUM, AVG, PRODUCT, MIN or MAX")


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's elements in a row, in place where it is contiguous in the processor's memory, else a copy."""
    detached = tensor.detach()
    return (detached if detached.is_contiguous() and not detached.is_cuda else detached.cpu().contiguous()).view(-1)


def _put(tensor: torch.Tensor, flat: torch.Tensor) -> None:
    """Move a result back to where `_flat` could not work in place."""
    if tensor.data_ptr() != flat.data_ptr():
        tensor.detach().copy_(flat.view(tensor.shape))
