"""Work that each step repeats calls few functions: a host that has just enough to do pays for every one."""

import sys
from collections.abc import Callable
from types import FrameType

import pytest

from regrow.devices import stream_points
from regrow.train.graphs.nested import Marks, held
from regrow.train.script.callers import script_frames
from regrow.train.script.source import is_script


def calls(run: Callable[[], object]) -> list[str]:
    """Python functions that are called in it, without itself."""
    seen: list[str] = []

    def look(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            seen.append(frame.f_code.co_name)

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        run()
    finally:
        sys.setprofile(before)
    return seen[1:]


def test_plain_values_of_a_state_are_not_walked_one_by_one() -> None:
    state = {f"setting {number}": value for number, value in enumerate([1, 2.0, True, None, "x", b"y"] * 10)}
    assert held(state, Marks()) == state
    assert len(calls(lambda: held(state, Marks()))) <= 4


def test_a_file_is_judged_once() -> None:
    script_frames()
    before = is_script.cache_info().misses
    assert script_frames()
    assert is_script.cache_info().misses == before


def test_a_look_at_a_device_calls_no_more_than_it_must(monkeypatch: pytest.MonkeyPatch) -> None:
    class Later(stream_points.StreamPoint):
        looks = 0

        def passed(self) -> bool:
            self.looks += 1
            return self.looks > 100

    monkeypatch.setattr(stream_points, "_PAUSE_LEAST", 0.0)
    monkeypatch.setattr(stream_points, "_PAUSE_MOST", 0.0)
    point = Later([])
    assert len(calls(lambda: point.wait(usual=1.0))) <= 2 * 101 + 2, "the look itself, and what is done meanwhile"
