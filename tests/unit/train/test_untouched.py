"""With `--no-script-rewrite`: what bodies carry in variables, and loops that may be left, are refused by name."""

import os
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.unit.train.test_body_bindings import Body, train
from tests.unit.train.test_carried_values import Steps

from regrow.core.early_reads import EarlyReads, PlaceInWorld
from regrow.core.errors import UsageError
from regrow.train.script.body_bindings import BodyBindings
from regrow.train.script.next_turn import LoopIterations
from regrow.train.values.untouched import Untouched

_count = 0


class Turn:
    """Item of a loop: no plain value."""

    def __init__(self, number: int) -> None:
        self.number = number


class Watched(Steps):
    """Steps of a job with the switch: the second is begun again, as after a fault."""

    def __init__(self, steps: int = 6) -> None:
        super().__init__(steps)
        self.told: list[str] = []
        self.untouched = Untouched(self.told.append, self.variables.is_clock)
        self.variables.places.untouched = self.untouched
        self.at[0] = self._rehearsed
        self.at[5] = lambda: self.variables.put_back(self.taken)

    def __iter__(self) -> Iterator[Any]:
        return map(Turn, super().__iter__())

    def _rehearsed(self) -> None:
        self.variables.put_back(self.taken)
        self.untouched.rehearsed(refuses=True)


def counted(steps: Watched) -> None:
    seen = 1
    for _ in steps:
        seen *= 2


def gathered(steps: Watched) -> None:
    seen = []
    for step in steps:
        seen.append(step.number)
    assert seen


def averaged(steps: Watched) -> None:
    seen = torch.zeros(2)
    for step in steps:
        seen = seen * 0.5 + step.number


def guarded(steps: Watched) -> None:
    seen = 0
    for step in steps:
        if step.number > 2:
            seen += 1


def counted_by_a_function(steps: Watched) -> None:
    seen = 0

    def add() -> None:
        nonlocal seen
        seen += 1

    for _ in steps:
        add()


def count() -> None:
    global _count
    _count += 1


def counted_in_a_module(steps: Watched) -> None:
    for _ in steps:
        count()


@pytest.mark.parametrize(
    ("how", "name"),
    [
        *((each, "`seen` of") for each in ("counted", "gathered", "averaged", "guarded", "counted_by_a_function")),
        ("counted_in_a_module", "`_count` of module"),
    ],
)
def test_what_a_body_carries_is_refused_before_step_0(how: str, name: str) -> None:
    steps = Watched()
    with pytest.raises(UsageError, match=name):
        globals()[how](steps)
    assert steps.told == []


def test_what_each_turn_makes_for_itself_is_left_alone() -> None:
    def clean(steps: Watched) -> float:
        meter, since = SimpleNamespace(seen=0), time.monotonic()
        for step in steps:
            shown = float(step.number)
            if shown > 1:
                last = shown * 2
                meter.seen = last
            took, since = time.monotonic() - since, time.monotonic()
        return shown + 0 * took

    steps = Watched()
    assert clean(steps) == 5.0
    assert steps.told == []


def test_what_shows_later_is_told_by_name_and_not_written() -> None:
    def late(steps: Watched) -> float:
        best = 0.0
        for step in steps:
            if step.number == 4:
                best = 7.0
        return best

    steps = Watched()
    steps.at[5] = lambda: steps.variables.put_back(before)
    before: dict[str, Any] = {}
    steps.at[4] = lambda: before.update(steps.variables.take())
    assert late(steps) == 7.0
    assert len(steps.told) == 1
    assert "`best` of" in steps.told[0]


def test_a_newcomer_tells_of_what_others_have() -> None:
    def ranks(steps: Watched, *, receives: dict[str, bytes] | None = None) -> float:
        best = 0.0
        for step in steps:
            if step.number == 2 and receives is None:
                best = 7.0
            if step.number == 3 and receives is not None:
                steps.variables.receive(receives)
        return best

    first, newcomer = Watched(), Watched()
    for each in (first, newcomer):
        each.variables.rehearsed = True
        each.at.pop(5)
    assert ranks(first) == 7.0
    assert ranks(newcomer, receives=first.encoded) == 0.0
    assert any("`best` of" in each for each in newcomer.told), first.encoded


class Asked:
    """Asks as a loop of steps does."""

    def __init__(self) -> None:
        self.turns: LoopIterations[Any] = LoopIterations(lambda _: None, sends=False)
        self.committed = True

    def __iter__(self) -> Any:
        for _ in range(2):
            self.turns.requests_step(sys._getframe(1))
            yield self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.turns.refuse_left(sys._getframe(1))


def test_a_loop_that_may_be_left_behind_a_body_is_refused_and_one_that_asks_before_is_not() -> None:
    for step in Asked():
        with step:
            pass
        if step.committed and step is not None:
            break
    with pytest.raises(UsageError, match="may be left after a step"):
        for step in Asked():
            with step:
                pass
            if step is not None:
                break


def test_what_a_function_reads_behind_a_body_is_refused() -> None:
    def binds_before(body: Body, number: float) -> float:
        loss = 0.0
        with body:
            loss = number
        return loss

    def shows(body: Any, number: float) -> str:
        with body:
            loss = SimpleNamespace(loss=number)
            loss.loss += 1
        return "loss" + str(body.loss)

    assert binds_before(Body(BodyBindings(writes=False)), 2.0) == 2.0
    shown: Any = Body(BodyBindings(writes=False))
    shown.loss = 4
    assert shows(shown, 2.0) == "loss4"
    with pytest.raises(UsageError, match="reads `loss` after"):
        train(Body(BodyBindings(writes=False)), 3.0)


def test_who_may_not_look_takes_all_for_read() -> None:
    early = EarlyReads()
    early.watch(rewrites=False)
    assert type(os.environ) is os._Environ
    assert set(early.found) == set(PlaceInWorld)
