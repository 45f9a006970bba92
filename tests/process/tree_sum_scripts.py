"""Bodies of the processes of a world that sum up in a tree."""

from typing import Any

import torch
from tests.process.comm_cases import data
from tests.process.comm_world import Seat, as_bytes

from regrow.comm import collectives
from regrow.step.dealing import Counter, deal, partial_nodes_of_all

CASES: list[tuple[int, torch.dtype, int]] = [
    (count, dtype, elements)
    for count in (4, 5, 7, 8, 13, 24)
    for dtype, elements in ((torch.float32, 1), (torch.float32, 3), (torch.float32, 5003), (torch.bfloat16, 70))
]


def leaf(count: int, dtype: torch.dtype, elements: int, index: int) -> torch.Tensor:
    """The gradient of one micro-batch, of very different sizes: another order of the sum gives other bits."""
    return data(dtype, (elements,), index, count) * 10.0 ** (index % 5)


def added(count: int, dtype: torch.dtype, elements: int, rank: int, size: int) -> list[torch.Tensor]:
    """The partial nodes of a rank."""
    counter: Counter[torch.Tensor] = Counter(count, torch.Tensor.add_)
    for index in range(*deal(count, size, rank)):
        counter.push(index, leaf(count, dtype, elements, index))
    return [value for _, value in counter.nodes]


def tree_sums(seat: Seat) -> list[Any]:
    """Every case, in pieces of 4 KB, as bytes."""
    collectives.PIECE_BYTES = 4096
    transport = seat.transport("tree")
    found = []
    for count, dtype, elements in CASES:
        nodes = added(count, dtype, elements, seat.rank, seat.size)
        transport.call("tree_reduce", (nodes, count, 1 / 3), {}).wait()
        found += as_bytes(nodes[:1])
    return found


def alone() -> list[Any]:
    """The same as one rank computes it."""
    found = []
    for count, dtype, elements in CASES:
        (total,) = added(count, dtype, elements, 0, 1)
        found += as_bytes([total.mul_(1 / 3)])
    return found


def in_another_order(size: int) -> list[Any]:
    """The sums of the ranks, one after another."""
    found = []
    for count, dtype, elements in CASES:
        total = torch.zeros(elements, dtype=dtype)
        for rank in range(size):
            spans = partial_nodes_of_all(count, size)[rank]
            nodes = added(count, dtype, elements, rank, size)
            assert len(spans) == len(nodes)
            total += sum(nodes[1:], nodes[0])
        found += as_bytes([total.mul_(1 / 3)])
    return found
