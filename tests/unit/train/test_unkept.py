"""Values that nobody carries are named where a newcomer lacks them, by a fingerprint; those that are alike are not."""

import array
import collections
import enum
import functools
import io
import itertools
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from regrow.train.attributes.keepers import Keepers
from regrow.train.script.callers import script_frames
from regrow.train.values.variables import Variables


class Box:
    """Has one value."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Trainer:
    """Holds what is protected, carries one array, and leaves another behind."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model, self.sum, self.last = model, torch.zeros(5_000), torch.zeros(5_000)

    def add(self, value: float) -> None:
        """As a body does."""
        self.sum = self.sum + value
        self.last = torch.full((5_000,), value)


def in_loop(thing: Any, protected: tuple[object, ...] = ()) -> Variables:
    variables = Variables()
    variables.follow(script_frames, keepers=Keepers([sys._getframe(1)], protected))
    variables.requests_step()
    variables.enters()
    variables.take()
    variables.begin()
    variables.rehearsed = True
    return variables


class Flags(enum.Flag):
    """A combination of which is no member."""

    A, B = 1, 2


COUNTS = {str(number): 1.0 for number in range(1_500)}


def an_enum() -> Any:
    class Inside(enum.Enum):
        A, B = 1, 2

    return Inside


class History(list[int]):
    """A list of a script's own kind."""


class Options(dict[str, int]):
    """A dictionary whose items are attributes."""

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__


class Unbound:
    """Raises wherever its class is asked for."""

    count = 0

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        raise LookupError("not there")


def add_to(items: list[int], number: int) -> None:
    items.append(number)


def call(*words: int) -> Callable[[Any], None]:
    return lambda box: box.value(*words)


def add(attribute: str) -> Callable[[Any], None]:
    return lambda box: setattr(box.value, attribute, 1)


def bind(value: Any) -> Callable[[Any], None]:
    return lambda box: setattr(box, "value", value)


def lacking(change: Callable[[Any], object], make: Callable[[], Any], *, alike: bool = False) -> list[str]:
    """Names that a newcomer tells that begins with what `make` gives, where its giver has changed that."""
    box = Box(make())
    giver = in_loop(box)
    change(box)
    told = giver.encoded()
    box = Box(make())
    newcomer = in_loop(box)
    newcomer.is_newcomer = True
    if alike:
        change(box)
    newcomer.receive(told)
    return [place.replace("\n", ".").removeprefix("object ") for place in newcomer.anew]


def advance(box: Any) -> None:
    next(box.value)


def wrap(box: Any) -> None:
    inner = box.value
    box.value = Box(inner or 1)


def drawn() -> Iterator[int]:
    yield from range(10)


def drawn_again() -> Iterator[int]:
    yield from range(9)


def a_cache() -> Callable[[str], list[int]]:
    return functools.lru_cache(maxsize=4)(lambda name: [len(name)])


def set_value(at: Any, value: Any) -> Callable[[Any], None]:
    return lambda box: box.value.__setitem__(at, value)


FORMS: dict[str, tuple[Callable[[Any], object], Callable[[], Any]]] = {
    "a large array": (set_value(5, 1.0), lambda: np.zeros(200_000)),
    "a large tensor": (lambda box: box.value.add_(1), lambda: torch.zeros(3_000_000)),
    "a large dictionary": (set_value(700, 1.0), lambda: dict.fromkeys(range(1_500), 0.0)),
    "a large set": (lambda box: box.value.add(-1), lambda: set(range(1_500))),
    "a list of numbers, in its middle": (set_value(700, 1.0), lambda: [0.0] * 1_500),
    "negative numbers": (set_value(700, -2.0), lambda: [-1.0] * 1_500),
    "names of counts": (lambda box: box.value.update(b=box.value.pop("a")), lambda: {"a": 1.0, **COUNTS}),
    "a sparse tensor": (lambda box: box.value.mul_(2), lambda: torch.eye(3).to_sparse()),
    "an enum of a function": (lambda box: setattr(box, "value", an_enum()["B"]), lambda: an_enum()["A"]),
    "flags": (lambda box: setattr(box, "value", Flags.A | Flags.B), lambda: Flags.A),
    "a list of objects": (lambda box: box.value.append(Box(1)), lambda: [Box(0)]),
    "a count": (advance, itertools.count),
    "an iterator": (advance, lambda: iter([1, 2, 3])),
    "a cycle": (advance, lambda: itertools.cycle([1, 2, 3])),
    "a generator": (advance, drawn),
    "an object made later": (wrap, lambda: None),
    "a kind of list": (lambda box: box.value.append(1), History),
    "a kind of dictionary": (add("count"), lambda: Options(count=0)),
    "a kind of array": (set_value(0, 1.0), lambda: np.zeros(3).view(np.recarray)),
    "a user's dictionary": (set_value("a", 1), lambda: collections.UserDict(a=0)),
    "an array of numbers": (set_value(0, 1.0), lambda: array.array("d", [0.0])),
    "bytes that change": (set_value(0, 1), lambda: bytearray(3)),
    "a text in memory": (lambda box: box.value.write("a"), io.StringIO),
    "a partial with a list": (call(1), lambda: functools.partial(add_to, [0])),
    "a count's method": (call(), lambda: itertools.count().__next__),
    "another function": (bind(drawn_again), lambda: drawn),
    "another class": (bind(History), lambda: Options),
    "a date of numpy's": (bind(np.datetime64("2020-01-02")), lambda: np.datetime64("2020-01-01")),
    "a shape": (bind(torch.Size([2])), lambda: torch.Size([1])),
    "a seed that was divided": (lambda box: box.value.spawn(1), lambda: np.random.SeedSequence(1)),
    "a sparse tensor by rows": (lambda box: box.value.values().mul_(2), lambda: torch.eye(3).to_sparse_csr()),
    "texts, in their middle": (set_value(700, "b"), lambda: ["a"] * 1_500),
    "a deque of objects": (lambda box: add("value")(Box(box.value[0])), lambda: collections.deque([Box(0)])),
    "a set of objects": (lambda box: add("value")(Box(next(iter(box.value)))), lambda: {Box(0)}),
    "many objects": (lambda box: add("value")(Box(box.value[-1])), lambda: [Box(0) for _ in range(300)]),
    "an object without a class": (lambda box: object.__setattr__(box.value, "count", 1), Unbound),
    "a cache of lists": (lambda box: box.value("a").append(5), a_cache),
}


@pytest.mark.parametrize("form", FORMS)
def test_what_a_newcomer_lacks_is_named_and_what_it_has_is_not(form: str) -> None:
    assert lacking(*FORMS[form]) == ["thing.value"]
    assert lacking(*FORMS[form], alike=True) == []


def test_what_objects_hold_far_inside_is_named_by_the_last_that_is_followed() -> None:
    def make() -> Box:
        return Box(Box(Box(Box(Box(0)))))

    names = lacking(lambda box: add("value")(box.value.value.value.value), make)
    assert names == ["thing.value.value.value.value"]


EQUAL: dict[str, Callable[[], Any]] = {
    "losses without a number": lambda: [float("nan")] * 1_500,
    "an enum of objects": lambda: [object(), cast(Any, enum.Enum("Made", {"A": object()}))["A"]],
    "an array of objects": lambda: np.array([Box(0), None]),
}


@pytest.mark.parametrize("form", EQUAL)
def test_what_is_equal_in_two_processes_is_not_named(form: str) -> None:
    box = Box(EQUAL[form]())
    variables = in_loop(box)
    box.value = EQUAL[form]()
    assert [place for place in variables.encoded() if place == "\tobject thing\nvalue"] == [] == variables.notes
    assert "object thing" in variables.places.now()


def test_values_that_never_change_in_a_cache_are_nothing_to_be_named() -> None:
    @functools.cache
    def squares(number: int) -> tuple[int, ...]:
        return tuple(range(number))

    assert lacking(lambda box: box.value(3), lambda: squares) == []


def test_of_arrays_beside_a_model_those_are_named_that_steps_read_before_they_bind_them() -> None:
    model = torch.nn.Linear(2, 2)
    trainer = Trainer(model)
    giver = in_loop(trainer, (model,))
    trainer.add(1.0)
    told = giver.encoded()
    trainer = Trainer(model)
    newcomer = in_loop(trainer, (model,))
    newcomer.is_newcomer = True
    newcomer.receive(told)
    assert newcomer.anew == ["object thing\nsum"]


def test_the_rehearsal_is_told_of_what_it_has_changed_and_nobody_puts_back() -> None:
    thing = SimpleNamespace(scores=dict.fromkeys(range(1_500), 0.0), none=None)
    variables = in_loop(thing)
    thing.scores[1], thing.none = 1.0, Box(1)
    variables.begin()
    (note,) = variables.notes
    assert "`scores` of object thing" in note and "none" not in note
