"""The conformance suite of the transport seam: ours beside torch's gloo, in real processes."""

from pathlib import Path
from typing import Any

import pytest
from tests.process.comm_calls import CASES
from tests.process.comm_scripts import (
    beyond_gloo,
    calls_on_gloo,
    calls_on_ours,
    conform,
    conform_in_pairs,
    echo,
    objects_alone,
    point_to_point,
    refusals,
    sums,
    through_torch,
    timeouts,
    wrong_tag,
)
from tests.process.comm_world import play, store

WORLDS = pytest.mark.parametrize(("size", "tcp"), [(2, False), (3, False), (4, False), (3, True)])


@WORLDS
def test_every_collective_answers_as_gloo_does_and_with_the_same_bits_each_time(
    tmp_path: Path, size: int, tcp: bool
) -> None:
    answers = play(size, tmp_path, conform, tcp=tcp)
    same_everywhere = [name for name in answers[0] if name.startswith(("all_reduce", "broadcast", "all_gather"))]
    assert len(same_everywhere) > 100
    for name in same_everywhere:
        assert all(answer[name] == answers[0][name] for answer in answers), f"{name} differs between ranks"


@pytest.mark.parametrize("tcp", [False, True], ids=["one machine", "between machines"])
def test_every_collective_answers_as_gloo_does_where_large_tensors_go_to_one_partner_after_the_other(
    tmp_path: Path, tcp: bool
) -> None:
    answers = play(4, tmp_path, conform_in_pairs, tcp=tcp)
    sums = [name for name in answers[0] if name.startswith("all_reduce")]
    assert sums
    for name in sums:
        assert all(answer[name] == answers[0][name] for answer in answers), f"{name} gave ranks different bits"


def test_a_sum_has_the_same_bits_on_every_rank_over_any_kind_of_socket_whole_or_in_pieces(tmp_path: Path) -> None:
    bits = set()
    for tcp in (False, True):
        folder = tmp_path / str(tcp)
        folder.mkdir()
        bits |= set(play(4, folder, sums, tcp=tcp))
    assert len(bits) == 1


@WORLDS
def test_large_sends_go_both_ways_at_once_beside_a_collective(tmp_path: Path, size: int, tcp: bool) -> None:
    assert len(play(size, tmp_path, point_to_point, tcp=tcp)) == size


def test_lists_are_exchanged_all_to_all_and_gathers_may_be_stacked(tmp_path: Path) -> None:
    play(4, tmp_path, beyond_gloo)


def test_a_receive_with_another_tag_says_what_came_instead(tmp_path: Path) -> None:
    _, error = play(2, tmp_path, wrong_tag)
    assert "rank 0 sent 12 bytes of float32 with tag 5; 12 with tag 6 were awaited" in error


@pytest.mark.parametrize(("size", "tcp"), [(2, False), (3, False), (4, False), (3, True), (18, False)])
def test_a_script_on_torch_distributed_finds_the_same_on_regrow_as_on_gloo(
    tmp_path: Path, size: int, tcp: bool
) -> None:
    with store(tmp_path) as address:
        ours = play(size, tmp_path, through_torch, address, tcp=tcp)
    theirs = play(size, tmp_path, through_torch, None)
    assert ours == theirs


def test_alone_the_echo_is_exact(tmp_path: Path) -> None:
    play(1, tmp_path, echo)


@pytest.fixture(scope="module")
def what_gloo_answers(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[Any]]]:
    return play(4, tmp_path_factory.mktemp("gloo"), calls_on_gloo)


@pytest.mark.parametrize("alone", [False, True], ids=["built together", "built alone"])
def test_all_groups_of_a_script_answer_as_gloos_do_when_new_when_formed_again_and_while_alone(
    tmp_path: Path, alone: bool, what_gloo_answers: list[dict[str, list[Any]]]
) -> None:
    with store(tmp_path) as address:
        ours = play(4, tmp_path, calls_on_ours, address, alone)
    for found, expected in zip(ours, what_gloo_answers, strict=True):
        for name in CASES:
            values, shapes = expected[name]
            assert found["first"][name] == values, name
            assert found["again"][name] == values, f"{name}, formed again"
            if name not in ("from anyone", "objects"):
                assert found["shapes"][name] == shapes, f"{name}, answered locally"


def test_while_alone_objects_are_the_callers_own(tmp_path: Path) -> None:
    assert play(4, tmp_path, objects_alone) == [
        [["mine", 0], ["mine", None], "placeholder"],
        [["mine", 1], ["mine", None], ("for", 1)],
        [["mine", 2], ["mine", None], "placeholder"],
        [["mine", 3], ["mine", None], "placeholder"],
    ]


def test_what_cannot_be_done_is_refused_with_its_reason(tmp_path: Path) -> None:
    with store(tmp_path) as address:
        said, other = play(2, tmp_path, refusals, address)
    assert said["timeout"].startswith("DeadlineExceeded: a collective was not done within 0.050 s")
    assert said["another rank"].startswith("StateError: this worker was built for another rank: rank 2 is not in")
    for of_rank in (said, other):
        assert of_rank["elsewhere"].startswith("UsageError: a process group was asked for with a backend that is not")
        assert of_rank["gloo"] == "gloo 2", "by our own transport, and formed again as all groups are"
        assert of_rank["left"] == "3", "a group that the script destroyed was formed again"
    assert "would ask its neighbours for the shapes" in other["pipeline"]


def test_a_group_of_the_scripts_own_waits_as_long_as_the_script_has_said_in_each_generation(tmp_path: Path) -> None:
    with store(tmp_path) as address:
        said, other = play(2, tmp_path, timeouts, address)
    assert other == {}
    assert said.keys() == {"made", "given", "made again", "given again"}
    assert all("rank 1 did not connect in time" in told for told in said.values()), said
