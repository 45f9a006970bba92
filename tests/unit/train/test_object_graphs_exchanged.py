"""Values that steps exchange in a class or a function: data goes back and travels, code stays and ends no training."""

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from regrow.core.errors import NotCarried, StateError
from regrow.hydration.codec import decode, encode
from regrow.train.graphs.object_graph import ObjectGraph
from regrow.train.graphs.walk import Thing, walk


class Held:
    def __init__(self, thing: Any) -> None:
        self.thing = thing


def env_class() -> Any:
    class Base:
        made = 0

    class Env(Base):
        seen: tuple[int, ...] = ()
        moves = [1]
        wind = torch.zeros(2)
        field = np.zeros(2)
        ids = itertools.count(3)
        old: int | None = 1

        def __init__(self) -> None:
            self.place = 0

        def step(self, by: int = 1) -> int:
            """Without anything from outside."""
            return by

        def rest(self) -> int:
            """Has nothing but its code."""
            return 0

    return Env


def count_in_the_base(env: Any) -> None:
    env.__mro__[1].made += 1


def put_a_tuple(env: Any) -> None:
    env.seen = (*env.seen, 7)


def put_a_list(env: Any) -> None:
    env.moves = [*env.moves, [len(env.moves)]]


def put_a_tensor(env: Any) -> None:
    env.wind = env.wind + 1


def put_an_array(env: Any) -> None:
    env.field = env.field + 2


def put_a_new_one(env: Any) -> None:
    env.best = [3]


def take_one_away(env: Any) -> None:
    if "old" in vars(env):
        del env.old


def count_on(env: Any) -> None:
    next(env.ids)


def put_an_object(env: Any) -> None:
    env.moves = env()


EXCHANGES = [
    count_in_the_base,
    put_a_tuple,
    put_a_list,
    put_a_tensor,
    put_an_array,
    put_a_new_one,
    take_one_away,
    count_on,
    put_an_object,
]


def shown(env: Any) -> str:
    """All that the class has, as text."""
    names = ("made", "seen", "moves", "wind", "field", "ids", "old", "best")
    return str([vars(each) if isinstance(each, env) else each for each in (getattr(env, at, "-") for at in names)])


def sent(graph: ObjectGraph) -> Any:
    """The state as it arrives elsewhere."""
    kept: dict[str, torch.Tensor] = {}

    def lift(path: str, tensor: torch.Tensor) -> str:
        kept[path] = tensor.clone()
        return path

    return decode(encode(graph.state_dict(), lift=lift), resolve=kept.__getitem__)


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_data_that_a_step_exchanges_goes_back_and_reaches_a_newcomer(
    exchange: Callable[[Any], None], live: bool
) -> None:
    one, other = env_class(), env_class()
    mine, theirs = ObjectGraph({"env": one()}), ObjectGraph({"env": other()})
    if live:
        mine.begin()
    exchange(one)
    memory, expected = mine.remember(), shown(one)
    told = sent(mine)
    exchange(one)
    exchange(one)
    assert mine.go_back(memory) and shown(one) == expected
    exchange(other)  # as its rehearsal does
    theirs.load_state_dict(told)
    assert shown(other) == expected and theirs.missing == []
    again = env_class()
    third = ObjectGraph({"env": again()})
    third.load_state_dict(sent(theirs))
    assert shown(again) == expected
    assert mine.apart == ""


def namesakes() -> Any:
    """A class, its base and that one's base, all of one name, as an environment of a script often is."""
    kind: Any = object
    for made in (1, 2):
        kind = type("Env", (kind,), {"made": made, "__module__": __name__})
    return type("Env", (kind,), {"__module__": __name__})


@pytest.mark.parametrize("base", [1, 2])
def test_a_base_of_the_same_name_has_what_it_had(base: int) -> None:
    one, other = namesakes(), namesakes()
    mine, theirs = ObjectGraph({"env": one()}), ObjectGraph({"env": other()})
    mine.begin()
    memory = mine.remember()
    one.__mro__[base].made += 5
    theirs.load_state_dict(sent(mine))
    assert [vars(each).get("made") for each in other.__mro__] == [vars(each).get("made") for each in one.__mro__]
    assert mine.go_back(memory) and [vars(each).get("made") for each in one.__mro__] == [None, 2, 1, None]


def test_a_state_of_before_takes_back_what_was_exchanged_since() -> None:
    env = env_class()
    graph = ObjectGraph({"env": env()})
    before, told = shown(env), sent(graph)
    for exchange in EXCHANGES:
        if exchange is not count_on:
            exchange(env)
    graph.load_state_dict(told)
    assert shown(env) == before
    assert "exchanged" not in graph.state_dict()


def test_attributes_of_a_function_travel() -> None:
    def made() -> Held:
        def act() -> int:
            act.calls += 1  # type: ignore[attr-defined]
            return int(act.calls)  # type: ignore[attr-defined]

        act.calls = 0  # type: ignore[attr-defined]
        return Held(act)

    one, other = made(), made()
    mine, theirs = ObjectGraph({"env": one}), ObjectGraph({"env": other})
    one.thing()
    theirs.load_state_dict(sent(mine))
    assert other.thing() == 2


def test_code_that_is_exchanged_is_refused_before_steps_count() -> None:
    env = env_class()
    graph = ObjectGraph({"env": env()})
    env.step = lambda self, by=[2]: by[0]
    for again in (graph.remember, graph.state_dict):
        with pytest.raises(NotCarried, match=r"steps change Env.step, which no other process could be given"):
            again()


def test_code_that_is_exchanged_later_goes_back_and_is_said_once_to_be_missing_elsewhere() -> None:
    one, other = env_class(), env_class()
    mine, theirs = ObjectGraph({"env": one()}), ObjectGraph({"env": other()})
    mine.begin()
    former = one.step
    one.step = later = lambda self, by=[2]: by[0]
    one.seen = (4,)
    memory = mine.remember()
    assert mine.apart == "steps change Env.step, which no other process could be given"
    one.step = former
    assert mine.go_back(memory) and one.step is later
    theirs.load_state_dict(sent(mine))
    assert theirs.missing[0] == ("Env.step is as the script has built it, though steps had changed it")
    assert other.seen == (4,) and other().step() == 1


def test_a_function_that_a_library_compiles_in_the_rehearsal_is_not_refused() -> None:
    env = env_class()
    graph = ObjectGraph({"env": env()})
    env.rest = compiled = lambda self: 1
    told = graph.state_dict()
    graph.begin()
    graph.load_state_dict(told)
    assert env.rest is compiled and graph.remember() is not None and graph.apart == ""


@pytest.mark.parametrize("at", [".step", ".__init__", ".__doc__", ".place.x", ".Base.Base.made", " global np"])
def test_no_received_value_takes_the_place_of_code(at: str) -> None:
    env = env_class()
    graph = ObjectGraph({"env": env()})
    told = sent(graph)
    number = next(n for n, node in enumerate(decode(told["graph"].tobytes())) if node[2] == "env.__class__")  # type: ignore[arg-type, var-annotated]
    told["exchanged"] = encode([[[number, at, 5]], []])
    with pytest.raises(StateError):
        graph.load_state_dict(told)
    assert env().step() == 1


class Unknown:
    """Refused as a whole: what it holds is gone through in no order."""


def closing() -> Callable[[], int]:
    """A function that no other process could be given."""
    kept = [1]
    return lambda: len(kept)


@pytest.mark.parametrize(
    ("thing", "followed"), [(closing, True), (lambda: {1, 2}, False), (lambda: {(Unknown(),): 1}, False)]
)
def test_a_thing_that_cannot_be_carried_ends_no_training_and_the_rest_is_carried_without_it(
    thing: Callable[[], object], followed: bool
) -> None:
    one, other = Held(["built"]), Held("built")
    mine, theirs = ObjectGraph({"env": one}), ObjectGraph({"env": other})
    mine.begin()
    one.thing, put = [7, thing()], thing()
    one.also = put  # type: ignore[attr-defined]
    memory, told = mine.remember(), sent(mine)
    assert mine.apart.startswith("env.")
    one.thing = None
    assert mine.go_back(memory) and one.thing[0] == 7 and one.also is put  # type: ignore[attr-defined]
    assert followed == (mine.missing == [])
    theirs.load_state_dict(told)
    assert other.thing == [7, None] and not hasattr(other, "other")
    assert any("env.also" in told for told in theirs.missing)


def test_an_attribute_that_is_left_out_is_as_it_was_built() -> None:
    one, other = Held(print), Held(print)
    mine, theirs = ObjectGraph({"env": one}), ObjectGraph({"env": other})
    mine.begin()
    one.thing = closing()
    theirs.load_state_dict(sent(mine))
    assert other.thing is print


def counted(walked: list[object]) -> Callable[..., list[Thing]]:
    """Go through a graph, and note that."""

    def noted(*of: Any) -> list[Thing]:
        walked.append(of)
        return walk(*of)

    return noted


@pytest.mark.parametrize(("thing", "looks"), [(closing, 3), (lambda: {1, 2}, 2), (lambda: {(Unknown(),): 1}, 2)])
def test_many_things_that_cannot_be_carried_are_seen_in_one_look(
    thing: Callable[[], object], looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, walked = Held(None), list[object]()
    graph = ObjectGraph({"env": one})
    graph.begin()
    one.thing = [thing() for _ in range(20)]
    monkeypatch.setattr("regrow.train.graphs.object_graph.walk", counted(walked))
    assert graph.remember() is not None
    graph.look_closely()
    assert len(walked) <= looks + 1


def test_too_many_things_are_gone_through_twice_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    one, walked = Held(None), list[object]()
    graph = ObjectGraph({"env": one})
    graph.begin()
    one.thing = [[each] for each in range(100)]
    monkeypatch.setattr("regrow.train.graphs.walk.MOST", 20)
    monkeypatch.setattr("regrow.train.graphs.object_graph.walk", counted(walked))
    assert graph.remember() is None and len(walked) == 2
    one.thing = None
    assert graph.remember() is not None


def test_the_same_thing_is_refused_before_steps_count() -> None:
    one = Held(None)
    graph = ObjectGraph({"env": one})
    one.thing = {1, 2}
    for again in (graph.remember, graph.state_dict):
        with pytest.raises(NotCarried, match="order in which it is gone through"):
            again()


def test_an_array_that_was_given_other_memory_in_place_cannot_be_put_back_and_ends_no_training() -> None:
    one = Held(np.zeros(3))
    graph = ObjectGraph({"env": one})
    graph.begin()
    memory = graph.remember()
    one.thing.resize(1000, refcheck=False)
    assert not graph.go_back(memory)
    assert "other memory" in graph.apart and graph.remember() is not None


def test_a_function_with_another_default_is_told_to_be_apart() -> None:
    def act(by: list[int] = [1]) -> int:  # noqa: B006
        return by[0]

    one = Held(act)
    graph = ObjectGraph({"env": one})
    graph.begin()
    act.__defaults__ = ([2],)
    assert graph.remember() is not None
    assert "steps change act default 0" in graph.apart


def test_a_function_that_each_step_makes_anew_is_not_kept() -> None:
    one = Held(None)
    graph = ObjectGraph({"env": one})
    graph.begin()
    made = []
    for step in range(3):
        one.thing = lambda step=[step]: step
        made.append(weakref.ref(one.thing))
        memory = graph.remember()
    del memory
    assert [each() is not None for each in made] == [False, False, True]


def test_what_cannot_be_told_is_seen_without_a_copy_of_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Held(np.zeros(1000))
    graph = ObjectGraph({"env": one})
    graph.begin()
    one.also = closing()  # type: ignore[attr-defined]
    monkeypatch.delattr(np, "concatenate")
    graph.look_closely()
    assert graph.apart.startswith("env.also")
