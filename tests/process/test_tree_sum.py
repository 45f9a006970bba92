"""Sums in one tree, whichever rank has which part of it: the same bits as one rank alone, over real connections."""

from pathlib import Path

import pytest
from tests.process.comm_world import play
from tests.process.tree_sum_scripts import alone, in_another_order, tree_sums


@pytest.mark.parametrize(("size", "tcp"), [(1, False), (2, False), (3, False), (4, True)])
def test_any_number_of_ranks_finds_what_one_finds_alone(tmp_path: Path, size: int, tcp: bool) -> None:
    assert play(size, tmp_path, tree_sums, tcp=tcp) == [alone()] * size


def test_another_order_of_the_sum_would_be_seen() -> None:
    assert in_another_order(3) != alone()
