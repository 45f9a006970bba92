"""Settings that a training changes with the size of its world."""

import math
from typing import Any

import pytest
import torch

from regrow.core.errors import UsageError
from regrow.step.policy import Policy
from regrow.train.policy import Scaled
from regrow.train.producing import ProducerSession, Producing
from regrow.train.session import Session


class Training:
    """One parameter with gradient 1 under plain SGD: an update is the learning rate that was used."""

    def __init__(self, policy: Policy, replicas: int = 1, lr: Any = 0.1) -> None:
        self.parameter = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.optimizer = torch.optim.SGD([self.parameter], lr=lr)
        self.replicas = replicas
        self.scaled = Scaled(policy, [self.optimizer], lambda: self.replicas)

    def rate(self) -> float:
        before = float(self.parameter.detach())
        self.parameter.grad = torch.ones(1, dtype=torch.float64)
        self.optimizer.step()
        return before - float(self.parameter.detach())


@pytest.mark.parametrize(
    ("rule", "base", "factors"),
    [
        ("constant", 1, {1: 1.0, 4: 1.0}),
        ("linear", 1, {1: 1.0, 2: 2.0, 4: 4.0}),
        ("linear", 4, {1: 0.25, 4: 1.0, 8: 2.0}),
        ("sqrt", 2, {2: 1.0, 8: 2.0, 1: math.sqrt(0.5)}),
        ({1: 1e-3, 4: 2e-3}, 1, {1: 1.0, 2: 1.0, 3: 1.0, 4: 2.0, 9: 2.0}),
        ({2: 1e-3, 4: 2e-3}, 4, {1: 0.5, 2: 0.5, 4: 1.0}),
    ],
)
def test_the_factor_follows_the_rule(rule: Any, base: int, factors: dict[int, float]) -> None:
    policy = Policy(rule, base=base)
    assert {replicas: policy.factor(replicas) for replicas in factors} == pytest.approx(factors)


def test_settings_of_a_size_that_is_not_listed_are_those_of_the_next_smaller() -> None:
    policy = Policy(settings={2: {"depth": 8}, 4: {"depth": 4}})
    assert [policy.setting("depth", replicas) for replicas in (1, 2, 3, 4, 7)] == [8, 8, 8, 4, 4]
    with pytest.raises(UsageError, match="no setting 'width'"):
        policy.setting("width", 2)
    with pytest.raises(UsageError, match="no setting 'width'"):
        Policy().setting("width", 2)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"learning_rate": "cubic"}, "no rule"),
        ({"learning_rate": {}}, "no rates"),
        ({"learning_rate": {1: 0.0}}, "not positive"),
        ({"learning_rate": {1: math.nan}}, "not positive"),
        ({"learning_rate": {0: 1.0}}, "row for 0 replicas"),
        ({"base": 0}, "base=0"),
        ({"settings": {1: {"a": 1}, 2: {"b": 1}}}, "different names"),
    ],
)
def test_what_makes_no_sense_is_refused_before_the_world_changes(wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        Policy(**wrong)


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1, dtype=torch.float64)])
def test_an_update_uses_the_scaled_rate_and_leaves_the_own_one(lr: Any) -> None:
    training = Training(Policy("linear"), 3, lr)
    assert training.rate() == pytest.approx(0.3)
    assert float(training.optimizer.param_groups[0]["lr"]) == 0.1
    training.replicas = 2
    assert training.rate() == pytest.approx(0.2)


def schedules(optimizer: torch.optim.Optimizer) -> list[torch.optim.lr_scheduler.LRScheduler]:
    return [
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12, eta_min=0.01),
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
        torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=12),
    ]


@pytest.mark.parametrize("which", range(3))
def test_a_schedule_goes_on_from_where_it_was(which: int) -> None:
    steady, changing = Training(Policy()), Training(Policy("linear"))
    worlds = [1, 1, 4, 4, 2, 3, 1, 1]
    schedule, other = (schedules(each.optimizer)[which] for each in (steady, changing))
    for replicas in worlds:
        changing.replicas = replicas
        assert changing.rate() == pytest.approx(replicas * steady.rate())
        schedule.step()
        other.step()
    assert other.state_dict() == schedule.state_dict()
    assert changing.optimizer.state_dict() == steady.optimizer.state_dict()


def test_a_producer_has_the_settings_of_its_world_though_nothing_is_protected_there() -> None:
    producer = ProducerSession.__new__(ProducerSession)
    Session.__init__(producer, Producing(0, 0, 2), seed=0)
    producer.protect(torch.nn.Linear(1, 1))
    producer.policy(Policy("linear", settings={1: {"depth": 8}, 2: {"depth": 4}}))
    assert producer.setting("depth") == 4
