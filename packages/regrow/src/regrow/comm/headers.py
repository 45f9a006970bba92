"""Headers of a rank's calls, sent before the data, by which ranks detect that they call different collectives.

A header has 20 bytes. Without it, bytes of one call would be taken for those of another, and summed.
"""

import enum
import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch

from regrow.comm import reductions
from regrow.core.errors import CollectiveMisuse

Header = bytes | bytearray | memoryview
Tensors = dict[int, torch.Tensor]

_FORMAT = struct.Struct("!BBBxIIQ")
BYTES = _FORMAT.size


class Operation(enum.IntEnum):
    """The collective that is called; the names are torch's."""

    all_reduce = 1
    reduce = 2
    reduce_scatter = 3
    all_gather = 4
    gather = 5
    scatter = 6
    all_to_all = 7
    broadcast = 8
    barrier = 9
    tree_reduce = 10
    send = 11


_DTYPES: tuple[torch.dtype, ...] = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.bool,
    torch.complex32,
    torch.complex64,
    torch.complex128,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
"""A dtype is sent as its index here; any other dtype as 255, and is then compared by its bytes alone."""
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
_UNKNOWN = 255
_ROOTED = {Operation.reduce, Operation.gather, Operation.scatter, Operation.broadcast}
_REDUCING = {Operation.all_reduce, Operation.reduce, Operation.reduce_scatter, Operation.tree_reduce}


class Call(NamedTuple):
    """One call of a collective on one rank.

    Attributes:
        number: number of earlier calls of this rank on this group, in this generation.
        dtype: dtype of its tensors.
        reduction: torch's number of the reduction; 0 if nothing is reduced.
        detail: the root's rank in the group, the tag of a send, or the micro-batches of a tree.
        whole: size of the tensor in bytes, if it is the same on all ranks; None: it depends on the peer.
    """

    operation: Operation
    number: int
    dtype: torch.dtype
    reduction: int = 0
    detail: int = 0
    whole: int | None = None

    def pack(self, count: int) -> bytes:
        """The header before `count` bytes for one peer."""
        return _FORMAT.pack(
            self.operation,
            _CODES.get(self.dtype, _UNKNOWN),
            self.reduction,
            self.detail & 0xFFFFFFFF,
            self.number & 0xFFFFFFFF,
            count if self.whole is None else self.whole,
        )

    def check(self, header: bytes, count: int, mine: int, peer: int, ranks: Sequence[int]) -> None:
        """Check that a peer makes the same call, when `count` bytes are expected from it.

        The dtype must be equal if numbers are added up. Otherwise bytes are copied, and may have another dtype.

        Args:
            mine: this rank's number in the group.
            peer: sender of the header.
            ranks: ranks of the group in the world; empty: not known.

        Raises:
            CollectiveMisuse: the calls differ; the message describes both.
        """
        expected = self.pack(count)
        if header == expected:
            return
        if self.operation not in _REDUCING and header[:1] + header[2:] == expected[:1] + expected[2:]:
            return
        here, there = _world_rank(mine, ranks), _world_rank(peer, ranks)
        of = f"the group of ranks {list(ranks)}" if ranks else "the group"
        if self.operation is Operation.send:
            raise CollectiveMisuse(
                _other_message(header, there, self.detail, count), hint="receive in the order of the sends"
            )
        ours, theirs = describe(expected), describe(header)
        raise CollectiveMisuse(
            f"ranks of {of} call different things: rank {here} calls {ours}, rank {there} calls {theirs}",
            hint="every rank of a group must call the same collectives in the same order, with tensors that fit",
        )


class CallHeader:
    """The headers of one call: those to send to each peer, and those expected from each peer.

    Args:
        out: tensors to send, by peer.
        into: tensors to receive, by peer.
        rank: this worker's rank in the group.
        ranks: ranks of the group in the world; empty: not known.
    """

    size = BYTES
    __slots__ = ("_call", "_into", "_out", "_rank", "_ranks", "_same")

    def __init__(self, call: Call, out: Tensors, into: Tensors, rank: int, ranks: Sequence[int]) -> None:
        self._call, self._out, self._into = call, out, into
        self._rank, self._ranks = rank, ranks
        self._same = None if call.whole is None else call.pack(0)

    def before(self, peer: int) -> bytes:
        """The header that is sent to a peer before its bytes."""
        return self._same or self._call.pack(self._out[peer].nbytes)

    def check(self, peer: int, header: Header) -> None:
        """Check the header from a peer. Raises `CollectiveMisuse` if the peer makes another call."""
        if self._same is None or header != self._same:
            count = self._into[peer].nbytes if self._same is None else 0
            self._call.check(bytes(header), count, self._rank, peer, self._ranks)


def _world_rank(rank: int, ranks: Sequence[int]) -> int:
    return ranks[rank] if ranks else rank


def _other_message(header: bytes, sender: int, tag: int, count: int) -> str:
    _, code, _, other, _, size = _FORMAT.unpack(header)
    dtype = f" of {_name(code)}" if code < len(_DTYPES) else ""
    return f"rank {sender} sent {size} bytes{dtype} with tag {other}; {count} with tag {tag} were awaited"


def describe(header: bytes) -> str:
    """Describe a header for people, such as "all_reduce (SUM) of 2 float32, its 7th call"."""
    operation, code, reduction, detail, number, size = _FORMAT.unpack(header)
    known = operation in set(Operation)
    name = Operation(operation).name if known else f"operation {operation}"
    text = name
    if known and Operation(operation) in _REDUCING and operation != Operation.tree_reduce:
        text += f" ({reductions.name(reduction)})"
    if operation != Operation.barrier:
        text += f" of {_amount(code, size)}"
    if known and Operation(operation) in _ROOTED:
        text += f" with its rank {detail} as the root"
    return f"{text}, its {_ordinal(number + 1)} call"


def _name(code: int) -> str:
    return str(_DTYPES[code]).removeprefix("torch.")


def _amount(code: int, size: int) -> str:
    if code >= len(_DTYPES):
        return f"{size} bytes"
    return f"{size // _DTYPES[code].itemsize} {_name(code)}"


def _ordinal(number: int) -> str:
    last = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{last}"
