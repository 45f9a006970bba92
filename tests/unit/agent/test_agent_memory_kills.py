import pytest

from regrow.agent import memory_kills
from regrow.agent.memory_kills import MemoryKills


def test_a_kill_is_told_as_one_for_memory_when_the_kernel_has_counted_one(monkeypatch: pytest.MonkeyPatch) -> None:
    count = 4
    monkeypatch.setattr(memory_kills, "memory_kills", lambda: count)
    kills = MemoryKills()
    assert not kills.explains(-9), "an ordinary kill"
    count = 6
    assert not kills.explains(1), "an exit of its own"
    assert [kills.explains(-9) for _ in range(3)] == [True, True, False], "each count explains one end"


def test_the_kernel_says_how_often_memory_ran_out() -> None:
    assert memory_kills.memory_kills() >= 0
