"""The collectives of `torch.distributed` over a `SocketMesh`, for tensors in host memory.

In small groups reductions are direct: every rank owns a part of the elements, receives that part from all others, adds
in the order of ranks, and sends the sum back. Each element is summed by one rank in one order, so all ranks get the
same bits, whatever arrives first. This takes two rounds, and the volume of a ring; small tensors are sent whole to all
ranks in one round, and added in the same order. Large tensors on one machine go to one partner after the other:
`algorithms/pairwise.py`. Larger groups work in rounds: `algorithms/hypercube.py`.
"""

import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

from regrow.comm import reductions
from regrow.comm.algorithms.hypercube import ByPeer, Hypercube
from regrow.comm.algorithms.pairwise import Pairwise
from regrow.comm.algorithms.rounds import DIRECT, Rounds
from regrow.comm.headers import Call, CallHeader, Operation
from regrow.comm.links import RECEIVING, SENDING
from regrow.comm.reductions import Combine
from regrow.comm.small_messages import SmallMessages, aligned
from regrow.comm.socket_mesh import SocketMesh
from regrow.core.ids import Seconds
from regrow.devices.accelerators import on_accelerator
from regrow.step.dealing import MicroBatchRange, fold, partial_nodes_of_all

PIECE_BYTES = 16 << 20
"""A large tensor is reduced in pieces of this size, which bounds the memory for received data."""
SMALL_BYTES = 16 << 10
"""Largest tensor in bytes that is reduced whole, in rounds along the bits of the rank."""
WHOLE_BYTES = 512 << 10
"""Most bytes that a rank may send so that all ranks send everything to each other, in one round instead of two."""

Tensors = dict[int, torch.Tensor]
"""Tensors by peer."""


def _view(tensor: torch.Tensor) -> memoryview:
    """The bytes of a flat contiguous tensor, without a copy."""
    data: memoryview = tensor.view(torch.uint8).numpy().data
    return data


class Collectives:
    """Runs one collective after another, in the order of the calls, which is the same on all ranks.

    Args:
        mesh: the connections.
        deadline: time limit of one collective, in seconds.
        most_direct: largest group size in which each rank exchanges with each.
    """

    def __init__(self, mesh: SocketMesh, deadline: Seconds, most_direct: int = DIRECT) -> None:
        self._mesh = mesh
        self.deadline = deadline
        """Time limit of one collective, in seconds."""
        self._rank, self._size = mesh.rank, mesh.size
        self._others = [peer for peer in range(mesh.size) if peer != mesh.rank]
        self._rounds = Rounds(mesh.rank, mesh.size, most_direct, mesh.one_machine)
        self._wide = Hypercube(self._rounds, self._exchange_parts, self._room)
        self._paired = Pairwise(mesh.rank, mesh.size, self._exchange_parts, self._room)
        self._receiving = {peer: threading.Lock() for peer in self._others}
        self._number = 0
        self._messages = SmallMessages(mesh.size)
        self._scratch = torch.empty(0, dtype=torch.uint8)

    # --- reductions --------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor, op: Any) -> None:
        """Reduce over all ranks, in place."""
        if tensor.is_sparse:
            self._all_reduce_sparse(tensor)
            return
        flat = _flat(tensor)
        self._reduce_all(flat, op, self._call(Operation.all_reduce, flat, op=op, whole=flat.nbytes))
        _put(tensor, flat)

    def _reduce_all(self, flat: torch.Tensor, op: Any, call: Call) -> None:
        combine = reductions.combine(call.reduction)
        reductions.prepare(call.reduction, op, flat)
        direct = self._rounds.direct
        small = flat.nbytes * max(1, self._size - 1) <= WHOLE_BYTES if direct else flat.nbytes <= SMALL_BYTES
        if small or flat.numel() < self._size:
            (self._reduce_whole if direct else self._wide.reduce_small)(flat, combine, call)
        elif self._rounds.paired(flat.nbytes):
            self._paired.all_reduce(flat, combine, call)
        else:
            reduce = self._reduce_piece if direct else self._wide.reduce_large
            step = max(self._size, PIECE_BYTES // flat.element_size())
            for start in range(0, flat.numel(), step):
                reduce(flat[start : start + step], combine, call if start == 0 else None)
        reductions.finish(call.reduction, flat, self._size)

    def _all_reduce_sparse(self, tensor: torch.Tensor) -> None:
        """Sum sparse tensors in the order of ranks: every rank gets all the others' tensors and adds them up."""
        mine = tensor.detach().coalesce()
        counts = [torch.zeros(1, dtype=torch.int64) for _ in range(self._size)]
        self.all_gather(counts, torch.tensor([len(mine.values())]))
        indices, values = mine.indices().contiguous(), mine.values().contiguous()
        found = [(indices.new_empty(len(indices), int(n)), values.new_empty(int(n), *values.shape[1:])) for n in counts]
        self.all_gather([each for each, _ in found], indices)
        self.all_gather([each for _, each in found], values)
        total = torch.sparse_coo_tensor(*found[0], mine.shape, is_coalesced=True, check_invariants=False)
        for its_indices, its_values in found[1:]:
            total = total + torch.sparse_coo_tensor(
                its_indices, its_values, mine.shape, is_coalesced=True, check_invariants=False
            )
        tensor.copy_(total.coalesce())  # not the result of `detach()`, which has indices of its own

    def _reduce_whole(self, flat: torch.Tensor, combine: Combine, call: Call) -> None:
        """Reduce in one round: each message is a header and a tensor in contiguous memory."""
        headers = self._headers(call, {}, {})
        parts, messages = self._messages.like(flat)
        mine, message = parts[self._rank].copy_(flat), messages[self._rank]
        message[: headers.size] = headers.before(self._rank)
        self._mesh.exchange(
            dict.fromkeys(self._others, message),
            {peer: messages[peer] for peer in self._others},
            headers=headers,
            joined=True,
            deadline=self.deadline,
        )
        self._combine_in_order(flat, mine, parts, combine)

    def _reduce_piece(self, flat: torch.Tensor, combine: Combine, call: Call | None) -> None:
        bounds = [flat.numel() * at // self._size for at in range(self._size + 1)]
        owned = [flat[bounds[at] : bounds[at + 1]] for at in range(self._size)]
        mine = owned[self._rank]
        parts = dict(zip(self._others, self._room(mine, len(self._others)), strict=True))
        self._exchange({peer: owned[peer] for peer in self._others}, parts, call)
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
        """Make `output` the reduction of `parts[rank]` over all ranks."""
        kind = reductions.number(op)
        flats = [_flat(part) for part in parts]
        even = _even(flats)
        wide, paired = even and not self._rounds.direct, even and self._rounds.paired(self._size * flats[0].nbytes)
        mine = flats[self._rank] = flats[self._rank].clone()
        if wide or reductions.factor(op) is not None:
            flats = [flat.clone() for flat in flats]
            mine = flats[self._rank]
            for flat in flats:
                reductions.prepare(kind, op, flat)
        if wide or paired:
            call = self._call(Operation.reduce_scatter, mine, op=op, whole=mine.nbytes)
            (self._wide if wide else self._paired).reduce_scatter(flats, reductions.combine(kind), call)
            reductions.finish(kind, mine, self._size)
            _put(output, mine)
            return
        arrived = dict(zip(self._others, self._room(mine, len(self._others)), strict=True))
        call = self._call(Operation.reduce_scatter, mine, op=op)
        self._exchange({peer: flats[peer] for peer in self._others}, arrived, call)
        total = torch.empty_like(mine)
        self._combine_in_order(total, mine, arrived, reductions.combine(kind))
        reductions.finish(kind, total, self._size)
        _put(output, total)

    def reduce(self, tensor: torch.Tensor, root: int, op: Any) -> None:
        """Reduce into the root's tensor; the others' tensors stay as they are."""
        work = tensor.detach().clone(memory_format=torch.contiguous_format)
        flat = _flat(work)
        call = self._call(Operation.reduce, flat, op=op, detail=root, whole=flat.nbytes)
        self._reduce_all(flat, op, call)
        _put(work, flat)
        if self._rank == root:
            tensor.copy_(work)

    def tree_reduce(self, nodes: Sequence[torch.Tensor], count: int, scale: float) -> None:
        """Sum the micro-batches of all ranks in one tree over `count` of them, into the first of `nodes`.

        Args:
            nodes: this rank's partial sums in order: flat, of one size and dtype. All of them are overwritten.
            count: micro-batches of all ranks, distributed over them by rank (`regrow.step.dealing`).
            scale: factor of the sum.
        """
        held = partial_nodes_of_all(count, self._size)
        call = self._call(Operation.tree_reduce, nodes[0], detail=count, whole=nodes[0].nbytes)
        step = max(self._size, PIECE_BYTES // nodes[0].element_size())
        for start in range(0, nodes[0].numel(), step):
            pieces = [node[start : start + step] for node in nodes]
            self._tree_reduce_piece(pieces, held, count, scale, call if start == 0 else None)

    def _tree_reduce_piece(
        self,
        nodes: Sequence[torch.Tensor],
        held: Sequence[Sequence[MicroBatchRange]],
        count: int,
        scale: float,
        call: Call | None,
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
            self._exchange(out, into, call if at == 0 else None)
        total = fold(count, found, torch.Tensor.add_)
        if scale != 1.0:
            total.mul_(scale)
        if total.data_ptr() != mine.data_ptr():
            mine.copy_(total)
        self._exchange(dict.fromkeys(self._others, mine), {peer: owned(nodes[0], peer) for peer in self._others})

    # --- copies ------------------------------------------------------------------------------------------------

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Give all ranks the root's values."""
        flat = _flat(tensor)
        call = self._call(Operation.broadcast, flat, detail=root, whole=flat.nbytes)
        if not self._rounds.direct:
            self._wide.broadcast(flat, root, call)
        elif self._rank == root:
            self._exchange(dict.fromkeys(self._others, flat), {}, call)
        else:
            self._exchange({}, {root: flat}, call)
        _put(tensor, flat)

    def all_gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        """Make each `outputs[r]` rank r's tensor."""
        mine = _flat(tensor)
        flats = {peer: _flat(outputs[peer]) for peer in self._others}
        every = [flats.get(rank, mine) for rank in range(self._size)]
        paired = self._rounds.paired(self._size * mine.nbytes)
        if (paired or not self._rounds.direct) and _even(every):
            call = self._call(Operation.all_gather, mine, whole=mine.nbytes)
            (self._paired if paired else self._wide).all_gather(every, call)
        else:
            self._exchange(dict.fromkeys(self._others, mine), flats, self._call(Operation.all_gather, mine))
        for peer, flat in flats.items():
            _put(outputs[peer], flat)
        outputs[self._rank].copy_(tensor.reshape(outputs[self._rank].shape))

    def gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, root: int) -> None:
        """On the root, make each `outputs[r]` rank r's tensor."""
        call = self._call(Operation.gather, tensor, detail=root)
        if self._rank != root:
            self._exchange({root: _flat(tensor)}, {}, call)
            return
        flats = {peer: _flat(outputs[peer]) for peer in self._others}
        self._exchange({}, flats, call)
        for peer, flat in flats.items():
            _put(outputs[peer], flat)
        outputs[root].copy_(tensor)

    def scatter(self, output: torch.Tensor, parts: Sequence[torch.Tensor], root: int) -> None:
        """Make `output` the root's `parts[rank]`."""
        call = self._call(Operation.scatter, output, detail=root)
        if self._rank == root:
            self._exchange({peer: _flat(parts[peer]) for peer in self._others}, {}, call)
            output.copy_(parts[root])
            return
        flat = _flat(output)
        self._exchange({}, {root: flat}, call)
        _put(output, flat)

    def all_to_all(self, outputs: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> None:
        """Make each `outputs[r]` rank r's `parts[rank]`."""
        flats = {peer: _flat(outputs[peer]) for peer in self._others}
        call = self._call(Operation.all_to_all, outputs[self._rank])
        self._exchange({peer: _flat(parts[peer]) for peer in self._others}, flats, call)
        for peer, flat in flats.items():
            _put(outputs[peer], flat)
        outputs[self._rank].copy_(parts[self._rank])

    def barrier(self) -> None:
        """Wait for all ranks."""
        empty = torch.empty(0, dtype=torch.uint8)
        call = self._call(Operation.barrier, empty, whole=0)
        if self._rounds.direct:
            nothing = dict.fromkeys(self._others, empty)
            self._exchange(nothing, nothing, call)
        else:
            self._wide.reduce_small(empty, torch.Tensor.add_, call)

    # --- point to point ----------------------------------------------------------------------------------------

    def send(self, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> None:
        """Send tensors to one peer, which receives them in the same order."""
        for tensor in tensors:
            flat = _flat(tensor)
            headers = self._headers(Call(Operation.send, 0, flat.dtype, detail=tag), {peer: flat}, {})
            self._mesh.exchange({peer: _view(flat)}, {}, headers=headers, channel=SENDING, deadline=self.deadline)

    def receive(self, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> None:
        """Receive tensors from one peer. Raises `CollectiveMisuse` if the peer sends something else first."""
        with self._receiving[peer]:
            for tensor in tensors:
                self._receive(tensor, peer, tag)

    def _receive(self, tensor: torch.Tensor, peer: int, tag: int) -> None:
        flat = _flat(tensor)
        headers = self._headers(Call(Operation.send, 0, flat.dtype, detail=tag), {}, {peer: flat})
        self._mesh.exchange({}, {peer: _view(flat)}, headers=headers, channel=RECEIVING, deadline=self.deadline)
        _put(tensor, flat)

    def receive_any(self, tensors: Sequence[torch.Tensor], tag: int) -> int:
        """Receive from the first peer that sends, leaving out peers that another receive names; returns its rank."""
        until = time.monotonic() + self.deadline
        while True:
            free = [peer for peer in self._others if not self._receiving[peer].locked()]
            for peer in self._mesh.await_any(free, until=until):
                if self._receiving[peer].acquire(blocking=False):
                    try:
                        for tensor in tensors:
                            self._receive(tensor, peer, tag)
                    finally:
                        self._receiving[peer].release()
                    return peer

    # --- bytes -------------------------------------------------------------------------------------------------

    def _call(
        self, operation: Operation, tensor: torch.Tensor, *, op: Any = None, detail: int = 0, whole: int | None = None
    ) -> Call:
        """Describe the present call; the others get the description before its first bytes."""
        number, self._number = self._number, self._number + 1
        return Call(operation, number, tensor.dtype, 0 if op is None else reductions.number(op), detail, whole)

    def _headers(self, call: Call, out: Tensors, into: Tensors) -> CallHeader:
        return CallHeader(call, out, into, self._rank, self._mesh.ranks)

    def _exchange(self, out: Tensors, into: Tensors, call: Call | None = None) -> None:
        """Send `out` and receive `into`; with `call`, both sides first exchange and compare headers."""
        self._mesh.exchange(
            {peer: _view(tensor) for peer, tensor in out.items()},
            {peer: _view(tensor) for peer, tensor in into.items()},
            headers=None if call is None else self._headers(call, out, into),
            deadline=self.deadline,
        )

    def _exchange_parts(self, out: ByPeer, into: ByPeer, call: Call | None = None) -> None:
        """Like `_exchange` with several tensors for each peer, whose sizes follow from the call."""
        self._mesh.exchange(
            {peer: [_view(part) for part in parts] for peer, parts in out.items()},
            {peer: [_view(part) for part in parts] for peer, parts in into.items()},
            headers=None if call is None else self._headers(call, {}, {}),
            deadline=self.deadline,
        )

    def _room(self, like: torch.Tensor, count: int) -> list[torch.Tensor]:
        """`count` tensors of the size and dtype of `like`, in memory that the next call reuses."""
        size = aligned(like.nbytes)
        if self._scratch.nbytes < size * count:
            self._scratch = torch.empty(size * count, dtype=torch.uint8)
        return [self._scratch[at * size : at * size + like.nbytes].view(like.dtype) for at in range(count)]


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's elements in one dimension: in place if it is contiguous in host memory, else a copy."""
    detached = tensor.detach()
    return (
        detached if detached.is_contiguous() and not on_accelerator(detached) else detached.cpu().contiguous()
    ).view(-1)


def _even(flats: Sequence[torch.Tensor]) -> bool:
    return all(flat.nbytes == flats[0].nbytes for flat in flats)


def _put(tensor: torch.Tensor, flat: torch.Tensor) -> None:
    """Copy a result back into a tensor of which `flat` is a copy."""
    if tensor.data_ptr() != flat.data_ptr():
        tensor.detach().copy_(flat.view(tensor.shape))
