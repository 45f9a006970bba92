"""Objects that hold what is protected: their plain attributes go with the steps, as the script's variables do."""

import copy
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from regrow.train.attributes.keepers import keepers
from regrow.train.state.variables import Variables


class Average:
    """With a count beside what is protected."""

    def __init__(self, **things: Any) -> None:
        self.updates, self.seen, self.when = 0, [1], 0.5
        self.ema: Any = None
        self.__dict__ |= things


def found(protected: list[object], **locals: Any) -> list[str]:
    frame: Any = SimpleNamespace(f_locals=locals, f_globals={})
    return [each.name for each in keepers([frame], protected)]


@pytest.mark.parametrize(
    ("held", "name"),
    [
        (lambda net: Average(ema=net), "object it"),
        (lambda net: Average(models=[net]), "object it"),
        (lambda net: Average(models={"net": net}), "object it"),
        (lambda net: Average(inner=Average(ema=net)), "object it.inner"),
        (lambda net: [Average(ema=net)], "object it[0]"),
    ],
)
def test_whatever_holds_it_is_found_under_the_scripts_name(held: Callable[[nn.Module], object], name: str) -> None:
    net = nn.Linear(1, 1)
    assert found([net], it=held(net), other=Average(), meter=SimpleNamespace(count=3)) == [name]


def test_protected_objects_are_found_and_modules_wrappers_and_libraries_objects_are_not() -> None:
    net, average = nn.Linear(1, 1), Average()
    around = nn.Sequential(net)
    assert found([net, average], average=average, net=net, around=around, sys=sys, kind=Average) == ["object average"]


def test_they_are_put_back_and_told_with_the_variables_of_the_script() -> None:
    net = nn.Linear(1, 1)
    mine, other = (Average(ema=copy.deepcopy(net)) for _ in range(2))

    def follow(average: Average) -> Variables:
        variables = Variables()
        variables.follow(lambda: [sys._getframe(0)], keepers([sys._getframe(0)], [average.ema]))
        variables.asks()
        return variables

    first, second = follow(mine), follow(other)
    before = first.take()
    mine.updates, mine.seen[0] = 3, 4
    told = first.encoded()
    first.put_back(before)
    assert (mine.updates, mine.seen) == (0, [1])
    second.receive(told)
    assert (other.updates, other.seen, other.when) == (3, [4], 0.5)
