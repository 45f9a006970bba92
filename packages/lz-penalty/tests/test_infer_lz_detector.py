"""Detection of outputs that went round in circles."""

import random
import subprocess
import sys

import pytest

from lz_penalty.detector import (
    DriftingLoop,
    ExactLoop,
    drifting_loop,
    exact_loop,
    examine,
    repeated_share,
    z_function,
)


def agreement(tokens: list[int], place: int) -> int:
    """The Z-function by its definition."""
    length = 0
    while place + length < len(tokens) and tokens[length] == tokens[place + length]:
        length += 1
    return length


def least_period(tokens: list[int]) -> ExactLoop | None:
    """The least period of an end with 4 periods and 48 tokens, by trying all."""
    for period in range(1, len(tokens) + 1):
        looping = period
        while looping < len(tokens) and tokens[-1 - looping] == tokens[-1 - looping + period]:
            looping += 1
        if looping >= max(4 * period, 48):
            return ExactLoop(period, looping)
    return None


def some_outputs() -> list[list[int]]:
    draw = random.Random(3)
    outputs: list[list[int]] = [[], [1], [1] * 47, [1] * 48, [1, 2] * 30 + [3]]
    for _ in range(300):
        start = [draw.randrange(3) for _ in range(draw.randrange(40))]
        turn = [draw.randrange(3) for _ in range(draw.randint(1, 30))]
        outputs.append(start + (turn * 12)[: draw.randrange(200)])
    return outputs


def test_the_z_function_is_what_its_definition_says() -> None:
    for tokens in some_outputs():
        assert z_function(tokens) == [agreement(tokens, place) for place in range(len(tokens))]


def test_an_exact_loop_has_the_least_period_that_explains_the_end() -> None:
    found = [exact_loop(tokens) for tokens in some_outputs()]
    assert found == [least_period(tokens) for tokens in some_outputs()]
    assert 50 < sum(loop is not None for loop in found) < 300


@pytest.mark.parametrize(
    "tokens, loop",
    [
        ([9, 8, *[1, 2, 3] * 16], ExactLoop(3, 48)),
        ([*[1, 2, 3] * 16, 9], None),
        ([1, 2, 3] * 15, None),
        (list(range(20)) * 4, ExactLoop(20, 80)),
        (list(range(20)) * 3, None),
    ],
    ids=["loop", "left", "short", "four turns", "three turns"],
)
def test_an_exact_loop_has_four_turns_and_48_tokens(tokens: list[int], loop: ExactLoop | None) -> None:
    assert exact_loop(tokens) == loop


def test_a_loop_that_counts_up_drifts() -> None:
    tokens = [token for turn in range(60) for token in (1, 2, 3, 4, 5, 6, 7, 8, 100 + turn)]
    assert exact_loop(tokens) is None
    found = drifting_loop(tokens)
    assert isinstance(found, DriftingLoop)
    assert found.repeated > 0.5


def test_what_is_new_or_short_does_not_drift() -> None:
    draw = random.Random(1)
    assert drifting_loop([draw.randrange(1000) for _ in range(600)]) is None
    assert drifting_loop([1, 2, 3] * 10) is None
    assert repeated_share([1, 2, 3]) == 0


def test_only_the_recent_tokens_tell() -> None:
    looped = [1, 2, 3, 4, 5] * 100
    assert drifting_loop(looped + list(range(1000, 1300))) is None


def test_an_output_that_ended_by_itself_is_not_degenerate() -> None:
    tokens = [1, 2] * 40
    assert examine(tokens, hit_length_limit=True) == (ExactLoop(2, 80), True)
    assert examine(tokens, hit_length_limit=False) == (ExactLoop(2, 80), False)
    assert examine(list(range(80)), hit_length_limit=True) == (None, False)


def test_the_detector_needs_no_torch() -> None:
    code = "import sys, lz_penalty as lz; lz.examine([1], hit_length_limit=True); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
