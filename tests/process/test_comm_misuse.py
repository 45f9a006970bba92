"""Headers of calls come before their data: mistakes are errors of both ranks, and never sums."""

import re
from pathlib import Path

import pytest
from tests.process.comm_misuse import BAD, MISMATCHES, callbacks, hooks, mismatches, reductions, refused
from tests.process.comm_world import play, store

EXPECTED = {
    "sizes": "all_reduce (SUM) of 2 float32, its 2nd call, rank 1 calls all_reduce (SUM) of 3 float32, its 2nd call",
    "nothing and something": "all_reduce (SUM) of 0 float32, its 1st call, rank 1 calls all_reduce (SUM) of 3 float32",
    "large": "all_reduce (SUM) of 300000 float32, its 1st call, rank 1 calls all_reduce (SUM) of 300001 float32",
    "dtypes": "all_reduce (SUM) of 4 float32, its 1st call, rank 1 calls all_reduce (SUM) of 2 float64, its 1st call",
    "reductions": "all_reduce (SUM) of 2 float32, its 1st call, rank 1 calls all_reduce (MAX) of 2 float32",
    "operations": "all_reduce (SUM) of 2 float32, its 1st call, rank 1 calls barrier, its 1st call",
    "one more": "broadcast of 2 float32 with its rank 0 as the root, its 2nd call",
}


@pytest.mark.parametrize("tcp", [False, True], ids=["unix", "tcp"])
def test_ranks_that_call_different_things_hear_both_calls(tmp_path: Path, tcp: bool) -> None:
    said = play(3, tmp_path, mismatches, tcp=tcp)
    for name in MISMATCHES:
        told = [of_rank[name] for of_rank in said]
        assert "nothing was raised" not in told
        misuses = [text for text in told if text.startswith("ranks of the group call different things: ")]
        assert misuses, told
        words = EXPECTED[name].split(", rank 1 calls ")
        assert any(all(word in text for word in words) for text in misuses), told


def test_a_call_that_cannot_be_right_is_an_error_of_its_own_line_and_spoils_nothing(tmp_path: Path) -> None:
    with store(tmp_path) as address:
        said, other = play(2, tmp_path, refused, address)
    assert said == other
    assert said.keys() == BAD.keys()
    assert not [name for name, text in said.items() if not re.search(r"\(.+\)$", text)], "a cure is missing"
    assert said["bitwise of floats"].startswith("BAND of float32 cannot be had")
    assert (
        said["sparse"] == "broadcast of a sparse tensor is not supported (only all_reduce is; call to_dense() before)"
    )
    assert ": the input has 5 elements where 4 are needed" in said["parts"]


def test_integers_are_averaged_sums_have_factors_and_sparse_tensors_are_summed(tmp_path: Path) -> None:
    with store(tmp_path) as address:
        found = play(2, tmp_path, reductions, address)
    assert found[0]["average"] == [-4, 4, 7], "rounded towards zero, as NCCL does"
    assert found[0]["scaled"] == [[1.5] * 3, [0.0, 1.0], [0.0, 1.0, 2.0, 3.0]]
    assert found[1]["scaled"][1] == [2.0, 3.0]
    rows = found[0]["sparse"]
    assert rows == [[4.0, 2.0], [4.0, 2.0], [0, 0], [0, 0], [4.0, 2.0], [0, 0]]
    assert all(found[1][name] == found[0][name] for name in ("average", "sparse"))


def test_ddp_learns_the_same_as_on_gloo_by_hooks_and_from_sparse_gradients(tmp_path: Path) -> None:
    with store(tmp_path) as address:
        ours = play(3, tmp_path, hooks, address)
    theirs = play(3, tmp_path, hooks, None)
    for found in ours:
        assert found == ours[0]
        for name, values in theirs[0].items():
            assert found[name] == pytest.approx(values, abs=2e-5), name
        assert found["chained"] == pytest.approx(found["plain"], abs=2e-5)
        assert found["power"] != found["plain"]


def test_callbacks_of_futures_may_call_collectives_and_wait_for_them(tmp_path: Path) -> None:
    with store(tmp_path) as address:
        assert play(3, tmp_path, callbacks, address) == [[9.0, ["inner", "later"]]] * 3
