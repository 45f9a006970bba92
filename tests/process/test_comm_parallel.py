"""Training under every kind of parallelism goes on with the same bits after its groups were formed anew."""

import threading
from pathlib import Path

import pytest
from tests.process.comm_parallel import (
    STEPS,
    halted_everywhere,
    halted_everywhere_without_torchs_reset,
    halted_in_a_prefetch,
    join,
    overwritten_between_steps,
    survive,
)
from tests.process.comm_world import Seat, store, world

WAYS = [
    "ddp",
    "fsdp2",
    "hsdp",
    "tp_dp",
    "tp_dp --tp-fsdp",
    "pp_dp",
    "hsdp --checkpoint-activations",
    "tp_dp --checkpoint-activations",
]


def seats(folder: Path) -> list[Seat]:
    return [Seat(rank, 4, str(folder), tcp=False) for rank in range(4)]


@pytest.mark.parametrize("way", WAYS)
def test_a_step_given_up_at_any_of_its_collectives_runs_again_with_the_same_bits(tmp_path: Path, way: str) -> None:
    arguments = ["--mode", *way.split()]
    with store(tmp_path) as address, world(seats(tmp_path), halted_everywhere, address, arguments) as training:
        training.halt_when_asked(STEPS)
        assert training.results() == [(True, True)] * 4


@pytest.mark.parametrize("way", ["fsdp2", "hsdp", "tp_dp --tp-fsdp", "hsdp --checkpoint-activations"])
def test_so_it_does_where_torch_cannot_reset_fsdp_itself(tmp_path: Path, way: str) -> None:
    body, arguments = halted_everywhere_without_torchs_reset, ["--mode", *way.split()]
    with store(tmp_path) as address, world(seats(tmp_path), body, address, arguments) as training:
        training.halt_when_asked(STEPS)
        assert training.results() == [(True, True)] * 4


@pytest.mark.parametrize(("way", "lost"), [("fsdp2", 0), ("hsdp", 1), ("tp_dp", 3), ("pp_dp", 0), ("pp_dp", 3)])
def test_a_newcomer_that_was_built_alone_takes_a_lost_rank_in_all_its_groups(
    tmp_path: Path, way: str, lost: int
) -> None:
    arguments = ["--mode", way]
    with store(tmp_path) as address, world(seats(tmp_path), survive, address, arguments) as training:
        state, losses = training.results()[lost]
        threading.Event().wait(0.1)  # let them be in the middle of some step
        training.processes[lost].kill()
        survivors = training.but(lost)
        with world([seats(tmp_path)[lost]], join, address, arguments, state, losses) as joining:
            assert joining.results() == ["built"]
            survivors.tell("halt")
            joining.tell("form")
            assert survivors.results() == [(True, True)] * 3
            assert joining.results() == [True]


def test_a_gather_ahead_of_time_that_was_halted_does_not_stand_in_the_way(tmp_path: Path) -> None:
    arguments = ["--mode", "fsdp2"]
    with store(tmp_path) as address, world(seats(tmp_path), halted_in_a_prefetch, address, arguments) as training:
        assert training.results() == ["asked"] * 4
        training.tell("halt")
        assert training.results() == [(True, True)] * 4


def test_no_whole_copy_of_parameters_outlives_their_shards(tmp_path: Path) -> None:
    arguments = ["--mode", "fsdp2"]
    with store(tmp_path) as address, world(seats(tmp_path), overwritten_between_steps, address, arguments) as training:
        assert training.results() == [True] * 4
