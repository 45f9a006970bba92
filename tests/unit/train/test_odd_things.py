"""Odd things around a loop end neither a training nor its following; flags are told beside what is made apart."""

import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from regrow.train.attributes.keepers import Keepers
from regrow.train.attributes.kept_values import Attributes
from regrow.train.rehearsal.unprotected_changes import Unprotected, reachable
from regrow.train.script.callers import script_frames
from regrow.train.state.protected import ProtectedState
from regrow.train.values.variables import Variables


class Steps:
    """Gives steps as the loop does, from a rehearsal on; `at` is called as the script asks for one."""

    def __init__(self, steps: int, *objects: Attributes) -> None:
        self.variables, self.steps, self.objects = Variables(), steps, objects
        self.at: dict[int, Callable[[], None]] = {}
        self.encoded: dict[str, bytes] = {}
        self.taken: dict[str, Any] = {}

    def __iter__(self) -> Iterator[int]:
        self.variables.follow(script_frames, self.objects)
        for number in range(-1, self.steps):
            self.variables.requests_step()
            self.at.get(number, lambda: None)()
            if number == 0:
                self.variables.take()
                self.back()
                self.variables.rehearsed = True
            self.taken = self.variables.take()
            self.variables.enters()
            yield number
        self.encoded = self.variables.encoded()

    def back(self) -> None:
        self.variables.put_back(self.taken)


def found(frame: Any) -> list[Attributes]:
    return Keepers([frame], []).find([frame.f_locals, frame.f_globals])


class Options(dict[Any, Any]):
    """Its items are its attributes."""

    def __init__(self, **items: Any) -> None:
        super().__init__(items)
        self.__dict__ = self


class Slotted:
    """One is not set at first."""

    __slots__ = ("count", "late")
    late: int

    def __init__(self) -> None:
        self.count = 0


class Unbound:
    """A proxy of nothing."""

    __slots__ = ("held",)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        raise RuntimeError("nothing is bound")

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


class Unreadable:
    """As a key it cannot be shown."""

    def __repr__(self) -> str:
        raise RuntimeError("not to be shown")


class Loading(dict[str, int]):
    """Its items are loaded from afar."""

    def items(self) -> Any:
        raise OSError("far away")


def lazy_module() -> types.ModuleType:
    def load(name: str) -> Any:
        raise KeyError(name)

    module = types.ModuleType("lazy")
    module.__getattr__ = load  # type: ignore[method-assign]
    return module


@pytest.mark.parametrize("make", [Unbound, lambda: {Unreadable(): 1}, lambda: Loading(a=1), lazy_module])
def test_what_fails_as_it_is_looked_at_hides_nothing_else(make: Callable[[], object]) -> None:
    odd = make()
    frame: Any = types.SimpleNamespace(f_locals={"odd": odd, "good": Slotted(), "around": [odd]}, f_globals={})
    assert "object good" in [each.name for each in found(frame)]


def test_of_lists_that_differ_between_ranks_nothing_is_told_to_another_kind_of_thing() -> None:
    one: Any = types.SimpleNamespace(f_locals={"calls": [Slotted()]}, f_globals={})
    other: Any = types.SimpleNamespace(f_locals={"calls": [types.SimpleNamespace(count=1)]}, f_globals={})
    names = [{each.name for each in found(frame) if each.name.startswith("object calls")} for frame in (one, other)]
    assert all(names)
    assert not names[0] & names[1]


def test_keys_that_are_no_text_end_nothing() -> None:
    options = Options(count=0)
    options[0] = 1
    steps = Steps(3, Attributes("options", options))
    for _ in steps:
        options["count"] += 1
    assert steps.variables.notes == []
    assert "object options\ncount" in steps.encoded


def test_a_slot_that_was_set_late_is_set_in_a_newcomer() -> None:
    slotted = Slotted()
    steps = Steps(3, Attributes("it", slotted))
    for number in steps:
        slotted.count += 1
        if number == 1:
            slotted.late = 5
    newcomer = Slotted()
    joining = Steps(2, Attributes("it", newcomer))
    joining.at[1] = lambda: joining.variables.receive(steps.encoded)
    list(joining)
    assert joining.variables.notes == []
    assert (newcomer.late, newcomer.count) == (5, 4 - 1)


def test_writes_that_count_no_version_are_put_back_to_their_steps_begin() -> None:
    steps, after = Steps(6), 0.0
    average = torch.zeros(5_000)
    for number in steps:
        if number == 3:
            steps.at[4] = steps.back
        after = float(average[0]) if number == 4 else after
        average.data.add_(1.0)
        _ = average
    assert after == 3.0


def trained(told: dict[str, bytes] | None, together: int) -> Any:
    steps = Steps(8)
    slow, after = False, False
    teacher: Any = None
    if told is not None:
        steps.at[1] = lambda: steps.variables.receive(told)
    for number in steps:
        after = slow if number == 1 else after
        if told is None and number == together:
            teacher = object()
        if told is None and number == 6:
            slow = True
        _ = teacher
    return steps.encoded if told is None else after


@pytest.mark.parametrize(("together", "taken"), [(3, True), (6, False)])
def test_a_flag_is_taken_over_unless_it_changed_in_the_body_that_made_something(together: int, taken: bool) -> None:
    assert trained(trained(None, together), together) == taken


class Lazy:
    """Finds its rank out when it is first asked."""

    def __init__(self) -> None:
        self.rank: Any = None
        self.count: Any = None

    def ask(self, rank: int) -> None:
        self.rank = rank if self.rank is None else self.rank
        self.count = rank if self.count is None else self.count + 1


def test_what_each_rank_has_found_out_for_itself_in_its_rehearsal_is_not_told_to_another() -> None:
    told, newcomer = Lazy(), Lazy()
    steps = Steps(3, Attributes("it", told))
    for _ in steps:
        told.ask(0)
    joining = Steps(2, Attributes("it", newcomer))
    joining.at[1] = lambda: joining.variables.receive(steps.encoded)
    for number in joining:
        if number != 0:
            newcomer.ask(1)
    assert (newcomer.rank, newcomer.count) == (1, told.count + 1)


class Lengthless(list[int]):
    """Raises wherever it is gone through."""

    def __len__(self) -> int:
        raise LookupError("not there")

    __iter__ = __len__  # type: ignore[assignment]


class Elsewhere:
    """Raises wherever its class is asked for, as one that stands for something that is not there."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        raise LookupError("not there")


def test_odd_things_do_not_end_the_search_for_what_is_not_protected() -> None:
    odd: object = Lengthless()
    proxy: object = Elsewhere()
    after = [torch.Generator()]
    net = torch.nn.Linear(1, 1)
    watched = Unprotected(ProtectedState([net]), [net], [sys._getframe()])
    watched.stop()
    assert "after[0]" in dict(reachable([sys._getframe()]))
    assert odd is not proxy and len(after) == 1
