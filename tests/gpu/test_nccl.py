"""Groups of several ranks on one GPU: NCCL for CUDA tensors, aborted from another thread, and formed anew."""

import threading
from pathlib import Path

import pytest
from tests.gpu.nccl_bodies import both_devices, halted_in_the_middle
from tests.process.comm_world import Seat, play, store, world

WORLD = 3
TOTAL = float(sum(range(1, WORLD + 1)))


def test_one_group_sums_tensors_of_either_device(tmp_path: Path) -> None:
    with store(tmp_path) as address:
        assert play(WORLD, tmp_path, both_devices, address) == [([TOTAL, TOTAL], [TOTAL, TOTAL])] * WORLD


@pytest.mark.timeout(180)
def test_who_waits_for_a_rank_that_never_comes_is_halted_and_forms_new_groups(tmp_path: Path) -> None:
    seats = [Seat(rank, WORLD, str(tmp_path), tcp=False) for rank in range(WORLD)]
    with store(tmp_path) as address, world(seats, halted_in_the_middle, address) as playing:
        assert playing.results() == ["stays away", *["waits"] * (WORLD - 1)]
        threading.Event().wait(2.0)  # the kernels of those who wait are on the device
        playing.tell("halt")
        for took, _, broke, before, after in playing.results():
            assert took < 10.0
            assert not broke
            assert before == after == ([TOTAL, TOTAL], [TOTAL, TOTAL])
