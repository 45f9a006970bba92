"""Decisions of a session with a GPU: the parts, their time, and the report on one that has ended."""

import json

import pytest
from gpu_session import LEAST_S, PARTS, PARTS_FOLDER, SKIPPED, Ended, Part, allowance, chosen, line_of

SHORT = Part(4, "short", 30.0, ())


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("", list(range(1, 13))), ("3", [3]), ("8, 2-4,3", [2, 3, 4, 8]), ("1-12", list(range(1, 13)))],
)
def test_parts_are_named_by_number_and_stay_in_their_order(text: str, numbers: list[int]) -> None:
    assert [part.number for part in chosen(text)] == numbers


@pytest.mark.parametrize("text", ["0", "13", "5-20", "two", "1-"])
def test_a_part_that_is_not_there_is_refused_unless_the_range_is_only_open(text: str) -> None:
    if text == "1-":
        assert [part.number for part in chosen(text)] == [1]
        return
    with pytest.raises(ValueError, match=r"no part|invalid literal"):
        chosen(text)


@pytest.mark.parametrize(
    ("left", "given"), [(100.0, 30.0), (30.0, 30.0), (20.0, 20.0), (15.0, 15.0), (14.9, 0.0), (0.0, 0.0), (-3.0, 0.0)]
)
def test_a_part_gets_its_limit_or_what_is_left_or_is_not_begun(left: float, given: float) -> None:
    assert allowance(SHORT, left) == given
    assert allowance(SHORT._replace(limit=90.0), 44.0) == 0.0
    assert allowance(SHORT._replace(limit=2.0), LEAST_S) == 2.0


@pytest.mark.parametrize(
    ("code", "left", "result"),
    [
        (0, 0, "passed"),
        (1, 0, "failed"),
        (-9, 0, "failed"),
        (None, 0, "killed"),
        (SKIPPED, 0, "skipped"),
        (0, 2, "failed"),
    ],
)
def test_a_line_says_how_a_part_ended_and_what_it_had_measured(code: int | None, left: int, result: str) -> None:
    output = 'noise\n{"ms": 3.5}\n{not json}\n[1]\n{"ms": 4.5}\nthe last words\n'
    line = line_of(SHORT, 20.0, Ended(code, 12.34, output, left))
    assert json.loads(json.dumps(line)) == line
    assert (line["part"], line["name"], line["result"]) == (4, "short", result)
    assert line["figures"] == [{"ms": 3.5}, {"ms": 4.5}]
    assert (line["seconds"], line["limit"], line["last"]) == (12.3, 20.0, "the last words")
    assert ("tail" in line) == (result in ("failed", "killed") and not left)
    assert line.get("left_behind", 0) == left


def test_each_part_has_a_number_of_its_own_and_a_program_that_is_there() -> None:
    assert [part.number for part in PARTS] == list(range(1, len(PARTS) + 1))
    for part in PARTS:
        program = part.command[0]
        assert program == "-m" or (PARTS_FOLDER / f"{part.name}.py").samefile(program)
