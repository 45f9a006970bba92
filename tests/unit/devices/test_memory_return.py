"""A newcomer whose device has too little memory waits, within a bound, for what a dead process still has."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from regrow.agent.workers.link import WorkerLink
from regrow.core.messages.vocabulary import Role
from regrow.devices import accelerators, memory_return
from regrow.devices.memory_return import LOOK_S, MOST_S, STILL_S, await_return, free_memory, ran_out
from regrow.train.worker import failed_device

GIB = 1 << 30


class Table:
    """Free memory by the time, and a clock that only waits move."""

    def __init__(self, free: Callable[[float], int | None]) -> None:
        self.time, self._free = 0.0, free

    def wait(self) -> int:
        return await_return(lambda: self._free(self.time), now=lambda: self.time, pause=self._pause)

    def _pause(self, seconds: float) -> None:
        self.time += seconds


@pytest.mark.parametrize("late", [2.0, 40.0])
def test_what_comes_back_late_is_waited_for_until_no_more_comes(late: float) -> None:
    table = Table(lambda at: GIB * (1 + (at >= late) + (at >= late + 2.0)))
    assert table.wait() == 2 * GIB
    assert late + 2.0 + STILL_S <= table.time <= late + 2.0 + STILL_S + 2 * LOOK_S


def test_what_never_comes_back_is_waited_for_a_minute() -> None:
    table = Table(lambda _: GIB)
    assert table.wait() == 0
    assert MOST_S <= table.time <= MOST_S + LOOK_S


def test_a_device_that_does_not_tell_is_not_waited_for() -> None:
    table = Table(lambda _: None)
    assert (table.wait(), table.time) == (0, 0.0)


def test_memory_that_torch_keeps_is_given_back_before_it_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [GIB]
    module = SimpleNamespace(empty_cache=kept.clear, mem_get_info=lambda: (2 * GIB - sum(kept), 3 * GIB))
    monkeypatch.setattr(accelerators, "in_use", lambda: module)
    assert free_memory() == 2 * GIB
    monkeypatch.setattr(accelerators, "in_use", lambda: None)
    assert free_memory() is None


def test_an_error_by_want_of_memory_is_known_behind_others() -> None:
    error = RuntimeError("the model could not be built")
    error.__cause__ = torch.OutOfMemoryError("out of memory")
    assert ran_out(error)
    assert not ran_out(RuntimeError("out of memory"))


@pytest.mark.parametrize(
    ("role", "restarts", "error", "waits"),
    [
        (Role.JOINER, 0, torch.OutOfMemoryError("out of memory"), True),
        (Role.RANK, 0, torch.OutOfMemoryError("out of memory"), False),
        (Role.RANK, 1, torch.OutOfMemoryError("out of memory"), True),
        (Role.JOINER, 0, ValueError("the script's own"), False),
    ],
)
def test_only_who_comes_after_others_waits_and_only_for_memory(
    monkeypatch: pytest.MonkeyPatch, role: Role, restarts: int, error: Exception, waits: bool
) -> None:
    sent: list[Any] = []
    link = SimpleNamespace(env=SimpleNamespace(role=role, restarts=restarts, rank=3, worker="w"), send=sent.append)
    monkeypatch.setattr(memory_return, "await_return", lambda: 5 * GIB)
    failed_device.judge_failure(cast(WorkerLink, link), error)
    assert [each.text for each in sent if "5.0 GiB more were free" in each.text] == [each.text for each in sent]
    assert bool(sent) is waits
