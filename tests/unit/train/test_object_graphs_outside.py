"""State of bound methods of C, functions, classes and enums is carried like an object's own, or refused by path."""

import enum
import itertools
import random
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from regrow.core.errors import NotCarried, StateError
from regrow.hydration.codec import decode, encode
from regrow.train.graphs.object_graph import ObjectGraph


class Holds:
    def __init__(self, thing: Any) -> None:
        self.thing = thing


class Norm:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self, x: float) -> float:
        self.count += 1
        return x / self.count


def pushing() -> Callable[[], list[int]]:
    kept: list[int] = []
    push = kept.append

    def more() -> list[int]:
        push(len(kept))
        return kept.copy()

    return more


def of_norm() -> Callable[[], float]:
    norm = Norm()
    return lambda: norm(1.0)


def of_defaults() -> Callable[[], float]:
    def more(norm: Norm = Norm(), *, counts: list[int] = [0]) -> float:  # noqa: B006, B008
        counts[0] += 1
        return norm(1.0) + counts[0]

    return more


def of_many() -> Callable[[], object]:
    counts: defaultdict[str, int] = defaultdict(int)
    sums = torch.zeros(2), np.zeros(2)

    def more() -> object:
        counts["a"] += 1
        sums[0].add_(1)
        sums[1][0] += 2
        return dict(counts), sums[0].tolist(), sums[1].tolist()

    return more


def of_attribute() -> Callable[[], object]:
    def more() -> object:
        norm: Norm = more.norm  # type: ignore[attr-defined]
        return norm(1.0)

    more.norm = Norm()  # type: ignore[attr-defined]
    return more


@pytest.mark.parametrize(
    "build",
    [
        lambda: random.Random(3).random,
        lambda: np.random.default_rng(3).normal,
        lambda: np.random.RandomState(3).rand,
        pushing,
        of_norm,
        of_defaults,
        of_many,
        of_attribute,
    ],
)
def test_what_functions_have_goes_back_and_reaches_a_newcomer(build: Callable[[], Callable[[], object]]) -> None:
    one, other = Holds(build()), Holds(build())
    mine, theirs = ObjectGraph({"env": one}), ObjectGraph({"env": other})
    one.thing()
    memory, told = mine.remember(), decode(encode(mine.state_dict(), lift=_LIFTED.lift), resolve=_LIFTED.get)
    expected = [one.thing() for _ in range(3)]
    mine.go_back(memory)
    assert [one.thing() for _ in range(3)] == expected
    theirs.load_state_dict(told)
    assert [other.thing() for _ in range(3)] == expected


class _Lifted:
    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}

    def lift(self, path: str, tensor: torch.Tensor) -> str:
        self._kept[path] = tensor.clone()
        return path

    def get(self, name: str) -> torch.Tensor:
        return self._kept[name]


_LIFTED = _Lifted()
SHARED = random.Random(5)


def test_globals_of_a_function_that_is_held_are_followed() -> None:
    holds = Holds(lambda: SHARED.random())
    graph = ObjectGraph({"env": holds})
    memory = graph.remember()
    first = holds.thing()
    graph.go_back(memory)
    assert holds.thing() == first


@pytest.mark.parametrize(
    ("thing", "why"),
    [
        (itertools.count().__next__, "iterator"),
        ({1}.add, "a dict with values None can"),
        ((lambda net: lambda: net(1))(nn.Linear(1, 1)), "protected by themselves"),
    ],
)
def test_what_a_function_has_that_cannot_be_carried_is_refused(thing: object, why: str) -> None:
    with pytest.raises(NotCarried, match=why) as raised:
        ObjectGraph({"env": Holds(thing)})
    assert str(raised.value).startswith("env.thing ") or str(raised.value).startswith("env.thing.__self__")


def env_of_class_state() -> Any:
    class Env:
        random = random.Random(3)
        numbers = np.zeros(2)
        seen: list[list[int]] = [[0]]
        inner = Norm()
        made = 0

        def draw(self, kept: list[int] = []) -> object:  # noqa: B006
            kept.append(1)
            self.numbers[0] += 1
            self.seen[0].append(len(kept))
            return self.random.random(), self.numbers.tolist(), str(self.seen), self.inner(1.0)

    return Env


def test_what_a_class_has_goes_back_and_reaches_a_newcomer() -> None:
    one, other = env_of_class_state()(), env_of_class_state()()
    mine, theirs = ObjectGraph({"env": one}), ObjectGraph({"env": other})
    one.draw()
    memory, told = mine.remember(), mine.state_dict()
    expected = [one.draw() for _ in range(3)]
    mine.go_back(memory)
    assert [one.draw() for _ in range(3)] == expected
    theirs.load_state_dict(told)
    assert [other.draw() for _ in range(3)] == expected


class Bullet:
    """Made in steps alone."""

    random = random.Random(9)
    colours = ["red"]

    def draw(self) -> float:
        """Draws from the class."""
        return self.random.random()


class Shooting:
    """Makes bullets."""

    def __init__(self) -> None:
        self.bullets: list[Bullet] = []

    def shoot(self) -> float:
        """Makes one."""
        self.bullets.append(Bullet())
        return self.bullets[-1].draw()


def test_a_class_of_which_a_failed_step_makes_the_first_object_goes_back() -> None:
    shooting = Shooting()
    graph = ObjectGraph({"env": shooting})
    memory = graph.remember()
    first = shooting.shoot()
    graph.go_back(memory)
    assert (shooting.shoot(), shooting.bullets[1:]) == (first, [])
    graph.load_state_dict(graph.state_dict())
    assert shooting.bullets[0].colours is Bullet.colours


class Late:
    """No code of the graph's names it."""

    kept: list[int] = []


def test_a_class_that_steps_bring_is_adopted_with_what_it_has() -> None:
    one, other = Holds(None), Holds(None)
    mine, theirs = ObjectGraph({"env": one}), ObjectGraph({"env": other})
    one.thing = [Late.kept, Late()]
    Late.kept.append(1)
    told = mine.state_dict()
    Late.kept.clear()
    theirs.load_state_dict(told)
    assert other.thing[0] is Late.kept and Late.kept == [1]


def test_a_function_that_has_another_thing_there_is_refused() -> None:
    one, other = Holds(lambda: 0), Holds(lambda: 0)
    one.thing.numbers, other.thing.numbers = np.zeros(2), np.zeros(3)
    mine, theirs = ObjectGraph({"env": one}), ObjectGraph({"env": other})
    with pytest.raises(StateError, match="numbers is another thing here"):
        theirs.load_state_dict(mine.state_dict())


class Planet(enum.Enum):
    EARTH = 1
    MARS = 2

    def __init__(self, number: int) -> None:
        self.moons, self.number = [number], number


def test_what_an_enum_has_goes_back() -> None:
    holds = Holds(Planet.EARTH)
    graph = ObjectGraph({"env": holds})
    memory = graph.remember()
    Planet.MARS.moons.append(7)
    graph.go_back(memory)
    assert Planet.MARS.moons == [2]
    Planet.MARS.number = 9
    graph.go_back(memory)
    assert Planet.MARS.number == 2


class Plain:
    """As torch's users write them."""

    @torch.no_grad()
    def act(self) -> int:
        """Without gradients."""
        return 1

    @property
    def size(self) -> int:
        """A size."""
        return 1

    metadata = {"modes": ["human"], "fps": 50}
    kinds = frozenset({"a", "b"})
    ids = itertools.count()


def test_classes_as_they_are_written_are_carried() -> None:
    one = SimpleNamespace(plain=Plain(), mean=np.mean, kind=nn.ReLU)
    graph = ObjectGraph({"env": one})
    graph.load_state_dict(graph.state_dict())
    graph.go_back(graph.remember())
