"""State that would come back otherwise, in silence, is refused by its path and with the reason."""

import array
import collections
import enum
import functools
import pathlib
import random
import threading
import types
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from regrow.core.errors import NotCarried, StateError
from regrow.hydration.codec import decode, encode
from regrow.train.graphs.object_graph import ObjectGraph


class Holds:
    def __init__(self, thing: object) -> None:
        self.thing = thing


def sub(kind: type) -> type:
    return type("Own", (kind,), {"__module__": __name__})


@dataclass(frozen=True)
class Frozen:
    x: int = 0


class Spot(NamedTuple):
    x: int
    y: tuple[int, ...]


class Sly(Spot):
    __slots__ = ()

    def __hash__(self) -> int:
        return 1


class Mood(enum.Enum):
    CALM = 1


class Slotted:
    __slots__ = ("__weakref__", "a", "b")


class Below(Slotted):
    __slots__ = ("c",)


HIDDEN = "its attributes do not show"


@pytest.mark.parametrize(
    ("thing", "why"),
    [
        (sub(random.Random)(3), HIDDEN),
        (sub(array.array)("d", [1]), HIDDEN),
        (array.array("d", [1]), HIDDEN),
        (sub(collections.deque)([1]), HIDDEN),
        (sub(dict)(), HIDDEN),
        (sub(list)(), HIDDEN),
        (sub(np.random.RandomState)(1), HIDDEN),
        (sub(np.random.PCG64)(1), HIDDEN),
        (sub(Spot)(1, ()), "tuple with attributes"),
        (np.zeros(2).view(sub(np.ndarray)), "class of its own"),
        (torch.zeros(2).as_subclass(sub(torch.Tensor)), HIDDEN),
        (functools.lru_cache(str), HIDDEN),
        (sub(pathlib.PurePosixPath)("/a"), "of a class of its own"),
        (types.MappingProxyType({}), HIDDEN),
        (threading.Event(), "of threads"),
        (threading.Semaphore(), "of threads"),
        (np.zeros(1, "V8"), "raw memory"),
        ({1, 2}, "a dict with values None can"),
        (set(), "a dict with values None can"),
        (frozenset({1, 2}), "a dict with values None can"),
        (sub(set)(), "a dict with values None can"),
        ({Frozen(1): 1}, "a key must be"),
        ({(1, Frozen(1)): 1}, "a key must be"),
        ({Sly(1, ()): 1}, "a key must be"),
    ],
)
def test_what_would_come_back_otherwise_is_refused_by_its_path(thing: object, why: str) -> None:
    with pytest.raises(NotCarried, match=why) as raised:
        ObjectGraph({"env": Holds(thing)}).state_dict()
    assert str(raised.value).startswith("env.thing")


def test_keys_that_are_whole_at_once_are_carried_in_their_order() -> None:
    one, other = Holds({}), Holds({})
    mine, theirs = ObjectGraph({"env": one}), ObjectGraph({"env": other})
    keys = [3, "a", Mood.CALM, Spot(1, (2,)), None, (1, "b"), b"c", np.int64(9), frozenset({1})]
    one.thing = dict.fromkeys(keys[:-1])
    theirs.load_state_dict(decode(encode(mine.state_dict())))
    assert list(other.thing) == keys[:-1]  # type: ignore[call-overload]
    one.thing = frozenset({(1, 2)})
    theirs.load_state_dict(decode(encode(mine.state_dict())))
    assert other.thing == {(1, 2)}


def test_a_received_key_with_code_of_its_own_is_refused() -> None:
    graph = ObjectGraph({"env": Holds({})})
    told = graph.state_dict()
    nodes = [
        ["object", f"{__name__}:Holds", "env", [["thing", (1,)], []]],
        ["dict", "dict", "env.thing", [None, (2,), 1]],
        ["object", f"{__name__}:Frozen", "", [[], []]],
    ]
    with pytest.raises(StateError, match="a key that may be none"):
        graph.load_state_dict({**told, "graph": np.frombuffer(encode(nodes), np.uint8)})


def test_slots_of_classes_that_inherit_slots_are_carried() -> None:
    one, other = Below(), Below()
    one.a, one.c = 1, 2  # type: ignore[attr-defined]
    ObjectGraph({"env": other}).load_state_dict(ObjectGraph({"env": one}).state_dict())
    assert (other.a, other.c, hasattr(other, "b")) == (1, 2, False)  # type: ignore[attr-defined]


def test_an_array_whose_shape_a_step_sets_has_its_own_again() -> None:
    holds = Holds(np.arange(6))
    graph = ObjectGraph({"env": holds})
    memory = graph.remember()
    thing: Any = holds.thing
    thing.shape = (2, 3)
    thing[0, 0] = 7
    thing.flags.writeable = False
    graph.go_back(memory)
    assert (thing.tolist(), thing.flags.writeable) == ([0, 1, 2, 3, 4, 5], True)
    objects = Holds(np.array([1, "a"], object))
    graph = ObjectGraph({"env": objects})
    memory = graph.remember()
    thing = objects.thing
    thing.shape = (2, 1)
    graph.go_back(memory)
    assert thing.tolist() == [1, "a"]


def test_an_array_that_a_step_gives_other_memory_or_another_type_in_place_is_refused() -> None:
    holds = Holds(np.arange(4))
    graph = ObjectGraph({"env": holds})
    memory = graph.remember()
    thing: Any = holds.thing
    thing.dtype = np.float64
    with pytest.raises(NotCarried, match=r"env.thing \(ndarray\).*another type, in place"):
        graph.go_back(memory)
    thing.dtype = np.int64
    thing.resize(1 << 20, refcheck=False)
    with pytest.raises(NotCarried, match=r"env.thing \(ndarray\).*other memory"):
        graph.go_back(memory)
    with pytest.raises(NotCarried, match="other memory"):
        graph.go_back(memory)
