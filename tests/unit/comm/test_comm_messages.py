"""Memory that small sums keep for the next ones of their size."""

from typing import Any, cast
from unittest.mock import MagicMock

import pytest
import torch
from torch.distributed import ReduceOp

from regrow.comm.collectives import WHOLE_BYTES, Collectives


def collectives(size: int) -> Collectives:
    """Of rank 0, whose mesh moves nothing."""
    mesh = MagicMock(rank=0, size=size, ranks=range(size))
    return Collectives(mesh, 10.0)


def kept(of: Collectives) -> int:
    return int(cast(Any, of)._messages.nbytes)


@pytest.mark.parametrize("size", [1, 2, 6, 16])
def test_a_sum_that_does_not_go_whole_keeps_no_messages(size: int) -> None:
    made = collectives(size)
    made.all_reduce(torch.ones(WHOLE_BYTES // 4 // max(1, size - 1) + size), ReduceOp.SUM)
    assert kept(made) == 0
    made.all_reduce(torch.ones(WHOLE_BYTES // 4 // max(1, size - 1)), ReduceOp.SUM)
    assert kept(made) > 0


def test_sums_of_many_sizes_keep_so_much_at_most() -> None:
    made = collectives(16)
    most = WHOLE_BYTES // 15 // 4
    for less in range(100):
        made.all_reduce(torch.ones(most - 16 * less), ReduceOp.SUM)
        assert 0 < kept(made) <= 8 << 20
