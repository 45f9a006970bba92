"""Faults on demand, as a worker suffers them in its own process."""

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from regrow.core.ids import Rank, StepNo
from regrow.core.messages.vocabulary import FaultHow, FaultSpec, FaultStage
from regrow.train.worker import fault_injection
from regrow.train.worker.fault_injection import FaultInjector


def injector(
    model: torch.nn.Module,
    how: FaultHow = FaultHow.EXCEPTION,
    stage: FaultStage = FaultStage.BACKWARD,
    halted: Callable[[], bool] = lambda: False,
) -> FaultInjector:
    link = SimpleNamespace(env=SimpleNamespace(worker="w"), send=lambda fact: None)
    made = FaultInjector(cast(Any, link), cast(Any, SimpleNamespace()), lambda: list(model.parameters()), halted)
    made.arm(FaultSpec("f", Rank(0), how, stage))
    return made


@pytest.mark.parametrize("frozen", [[], [0, 1], [1, 2], [2, 3]])
def test_a_fault_in_backward_strikes_whichever_parameters_are_frozen(frozen: list[int]) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    for at in frozen:
        list(model.parameters())[at].requires_grad_(False)
    faults = injector(model)
    faults.enter(StepNo(3))
    with pytest.raises(RuntimeError, match="fault on demand"):
        model(torch.ones(1, 2)).sum().backward()
    faults.leave()


@pytest.mark.parametrize("names", [("net", "average"), ("average", "net")])
def test_a_fault_in_backward_strikes_beside_parameters_that_get_no_gradient(names: tuple[str, str]) -> None:
    """Those of an average of the weights, say: protected, but no part of the forward."""
    models = torch.nn.ModuleDict(
        {name: torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)) for name in names}
    )
    faults = injector(models)
    faults.enter(StepNo(3))
    with pytest.raises(RuntimeError, match="fault on demand"):
        models["net"](torch.ones(1, 2)).sum().backward()
    faults.leave()


def test_a_body_with_nothing_that_trains_can_be_asked_to_fail() -> None:
    model = torch.nn.Linear(2, 1).requires_grad_(False)
    faults = injector(model)
    faults.enter(StepNo(3))
    model(torch.ones(1, 2))
    faults.leave()


def test_a_pause_lasts_until_the_fault_of_another_has_come_however_long_that_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fault_injection, "PAUSE_S", 120.0)
    news, looks = threading.Event(), []

    def halted() -> bool:
        looks.append(news.is_set())
        return looks[-1]

    faults = injector(torch.nn.Linear(2, 1), FaultHow.PAUSE, FaultStage.VOTE, halted)
    threading.Timer(0.1, news.set).start()
    began = time.monotonic()
    faults.inject(FaultStage.VOTE, StepNo(3))
    assert looks[-1] and time.monotonic() - began < 60.0


def test_a_pause_that_no_fault_ends_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault_injection, "PAUSE_S", 0.05)
    injector(torch.nn.Linear(2, 1), FaultHow.PAUSE, FaultStage.VOTE).inject(FaultStage.VOTE, StepNo(3))
