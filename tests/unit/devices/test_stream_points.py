"""A wait for a device is looked at again and again: often where it is expected to end."""

from types import SimpleNamespace

import pytest

from regrow.devices import stream_points
from regrow.devices.stream_points import StreamPoint


class Later(StreamPoint):
    """A point that is passed after some seconds of a clock that only sleeps move; it counts the looks."""

    def __init__(self, seconds: float) -> None:
        super().__init__([])
        self.left, self.clock, self.looks = seconds, 0.0, 0

    def passed(self) -> bool:
        self.looks += 1
        return self.clock >= self.left

    def sleep(self, seconds: float) -> None:
        self.clock += seconds


def late(monkeypatch: pytest.MonkeyPatch, seconds: float, usual: float) -> tuple[float, int]:
    """Seconds after its end at which a wait returns, and how often it has looked."""
    point = Later(seconds)
    clock = SimpleNamespace(monotonic=lambda: point.clock, sleep=point.sleep)
    monkeypatch.setattr(stream_points, "time", clock)
    point.wait(usual=usual)
    return point.clock - seconds, point.looks


@pytest.mark.parametrize("seconds", [0.003, 0.0507, 0.31, 4.0])
def test_a_wait_as_long_as_usual_ends_within_a_thousandth(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    for usual in (0.95 * seconds, seconds, 1.05 * seconds):
        after, looks = late(monkeypatch, seconds, usual)
        assert after <= max(51e-6, 0.0011 * seconds)
        assert looks < 1200


@pytest.mark.parametrize("usual", [0.0, 0.001, 0.02, 5.0])
def test_a_wait_unlike_those_before_ends_within_a_hundredth(monkeypatch: pytest.MonkeyPatch, usual: float) -> None:
    after, looks = late(monkeypatch, 0.3, usual)
    assert after <= 0.0031
    assert looks < 1200


def test_something_is_done_at_each_look(monkeypatch: pytest.MonkeyPatch) -> None:
    point, done = Later(0.2), []
    monkeypatch.setattr(stream_points, "time", SimpleNamespace(monotonic=lambda: point.clock, sleep=point.sleep))
    assert point.wait(lambda: done.append(point.clock)) <= point.clock
    assert len(done) == point.looks - 1
