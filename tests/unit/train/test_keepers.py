"""Objects that hold what is protected: their plain attributes go with the steps, as the script's variables do."""

import copy
import dataclasses
import os
import random
import re
import sys
import threading
from argparse import Namespace
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from regrow.train.attributes.keepers import Keepers
from regrow.train.attributes.kept_values import Attributes, ProcessSettings
from regrow.train.script.callers import script_frames
from regrow.train.values.variables import Variables


class Average:
    """With a count beside what is protected."""

    def __init__(self, **things: Any) -> None:
        self.updates, self.seen, self.when = 0, [1], 0.5
        self.ema: Any = None
        self.__dict__ |= things


class Loader(Average):
    """With an order of its own, led to its place by itself."""

    def __iter__(self) -> Iterator[int]:
        yield 1


class Trainer(Average):
    """Gives the batches itself, by the step's number."""

    def batch(self, step: int) -> int:
        return step + self.updates


class Unbound:
    """Raises wherever its class is asked for."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        raise LookupError("not there")


class Slotted:
    """Without a dictionary."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 1


def counting() -> Callable[[], int]:
    count = 0

    def function(kept: list[int] = [], *, calls: list[int] = []) -> int:  # noqa: B006
        nonlocal count
        count += 1
        kept.append(count)
        calls.append(count)
        return len(kept) + count

    return function


class Options:
    """A class that has what is set."""

    rate = 1.0


def keepers(frames: list[Any], protected: list[object], loader: object = None) -> list[Attributes]:
    each = Keepers(frames, protected, loader)
    return each.find([values for frame in frames for values in (frame.f_locals, frame.f_globals)])


def found(protected: list[object], **locals: Any) -> list[str]:
    frame: Any = SimpleNamespace(f_locals=locals, f_globals={})
    names = [each.name for each in keepers([frame], protected)]
    return [name for name in names if re.split(r"[.[ ]", name)[1] in locals]  # modules of tests are a script's own too


@pytest.mark.parametrize(
    ("held", "name"),
    [
        (lambda net: Average(ema=net), "object it"),
        (lambda net: Average(models=[net]), "object it"),
        (lambda net: Average(models={"net": net}), "object it"),
        (lambda net: Average(inner=Average(ema=net)), "object it.inner"),
        (lambda net: [Average(ema=net)], "object it[0]: Average"),
    ],
)
def test_whatever_holds_it_is_found_under_the_scripts_name(held: Callable[[nn.Module], object], name: str) -> None:
    net = nn.Linear(1, 1)
    assert name in found([net], it=held(net))


@pytest.mark.parametrize(
    "kept",
    [
        *(Average(lock=lock()) for lock in (threading.Lock, threading.RLock, threading.Condition, threading.Event)),
        Average(unbound=Unbound()),
        Average(),
        SimpleNamespace(count=3),
        Namespace(rate=0.1),
        Slotted(),
        random.Random(1),
    ],
)
def test_the_scripts_own_objects_and_options_are_found(kept: object) -> None:
    assert found([], it=kept, inside={"it": [kept]}) == ["object it"]


def test_an_object_with_a_lock_stays_as_it_is_while_a_thread_of_the_script_lives() -> None:
    kept, done = Average(lock=threading.Lock(), total=1), threading.Event()
    thread = threading.Thread(target=lambda: done.wait(60.0))
    thread.start()
    try:
        assert found([], it=kept) == []
        assert ".total" in dict(Keepers([], []).left_over(kept)), "so a replaced rank names it"
    finally:
        done.set()
        thread.join()
    assert found([], it=kept) == ["object it"]


def test_what_threads_use_and_what_gives_the_order_of_data_is_left_alone() -> None:
    loader = Loader(state=Average())
    with ThreadPoolExecutor() as pool:
        busy, pooled = Average(thread=threading.Thread(target=print)), Average(pool=pool)
    frame: Any = SimpleNamespace(f_locals={"busy": busy, "pooled": pooled, "loader": loader}, f_globals={})
    names = [each.name for each in keepers([frame], [], loader)]
    assert not {"object busy", "object pooled", "object loader.state"} & set(names)


def test_a_loader_that_holds_what_is_protected_is_found_and_so_is_a_trainer_whose_method_is_the_loader() -> None:
    net = nn.Linear(1, 1)
    trainer, holder = Trainer(), Loader(ema=net)
    for loader, locals in ((trainer.batch, {"it": trainer}), (holder, {"it": holder})):
        frame: Any = SimpleNamespace(f_locals=locals, f_globals={})
        assert "object it" in [each.name for each in keepers([frame], [net], loader)]


def test_protected_objects_are_found_and_modules_wrappers_and_libraries_objects_are_not() -> None:
    net, average = nn.Linear(1, 1), Average()
    around = nn.Sequential(net)
    assert found([net, average], average=average, net=net, around=around, sys=sys) == ["object average"]


def test_they_are_put_back_and_told_with_the_variables_of_the_script() -> None:
    net = nn.Linear(1, 1)
    mine, other = (Average(ema=copy.deepcopy(net)) for _ in range(2))

    def follow(average: Average) -> Variables:
        variables = Variables()
        variables.follow(lambda: [sys._getframe(0)], keepers([sys._getframe(0)], [average.ema]))
        variables.requests_step()
        return variables

    first, second = follow(mine), follow(other)
    before = first.take()
    mine.updates, mine.seen[0] = 3, 4
    told = first.encoded()
    first.put_back(before)
    assert (mine.updates, mine.seen) == (0, [1])
    second.receive(told)
    assert (other.updates, other.seen, other.when) == (3, [4], 0.5)


@pytest.mark.parametrize(
    ("make", "change", "look"),
    [
        (Slotted, lambda it: setattr(it, "count", 5), lambda it: it.count),
        (lambda: type("Kind", (Options,), {"rate": 1.0}), lambda it: setattr(it, "rate", 0.5), lambda it: it.rate),
        (counting, lambda it: it(), lambda it: (it.__closure__[0].cell_contents, it.__defaults__, it.__kwdefaults__)),
        (lambda: random.Random(1), lambda it: it.random(), lambda it: it.getstate()),
        (lambda: np.random.default_rng(1), lambda it: it.random(), lambda it: it.bit_generator.state),
        (lambda: np.random.RandomState(1), lambda it: it.rand(), lambda it: it.get_state()[2]),
        (
            lambda: torch.Generator().manual_seed(1),
            lambda it: torch.rand(1, generator=it),
            lambda it: it.initial_seed(),
        ),
        (lambda: ContextVar("it", default=0), lambda it: it.set(it.get() + 1), lambda it: it.get()),
        (
            lambda: SimpleNamespace(t=np.float64(1)),
            lambda it: setattr(it, "t", it.t / 2),
            lambda it: (it.t, type(it.t)),
        ),
    ],
)
def test_values_of_every_kind_of_thing_are_put_back_and_told(
    make: Callable[[], Any], change: Callable[[Any], object], look: Callable[[Any], object]
) -> None:
    def follow() -> tuple[Any, Variables]:
        thing, variables = make(), Variables()
        variables.follow(lambda: [sys._getframe(0)], [Attributes("it", thing)])
        variables.requests_step()
        return thing, variables

    (mine, first), (other, second), untouched = follow(), follow(), make()
    before = first.take()
    second.take()
    change(mine)
    told = first.encoded()
    first.put_back(before)
    assert look(mine) == look(untouched)
    second.receive(told)
    change(untouched)
    assert look(other) == look(untouched)


def test_a_setting_of_the_process_and_the_environment_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATE", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    settings, before = ProcessSettings(), torch.get_default_dtype()
    kept = dict(settings.read())
    assert "env RATE" in kept and "env LOCAL_RANK" not in kept
    try:
        torch.set_default_dtype(torch.float64)
        os.environ["RATE"] = "2"
        settings.write({name: kept[name] for name in ("dtype", "env RATE")})
        assert (torch.get_default_dtype(), os.environ["RATE"]) == (before, "1")
    finally:
        torch.set_default_dtype(before)


def test_what_the_stream_of_batches_draws_from_is_left_alone() -> None:
    reader = Average()

    def batches(around: object) -> Iterator[object]:
        while around:
            yield drawing.random()

    loader: Any = enumerate(map(str, batches(reader)))
    frame: Any = SimpleNamespace(f_locals={"reader": reader, "drawing": drawing, "other": Average()}, f_globals={})
    names = {each.name for each in keepers([frame], [], loader)}
    assert names & {"object reader", "object drawing", "object other"} == {"object other"}


drawing = random.Random(3)


def following(keepers: Keepers) -> Variables:
    variables = Variables()
    variables.follow(script_frames, keepers=keepers)
    variables.requests_step()
    return variables


def test_arrays_of_the_scripts_own_objects_are_put_back_and_told() -> None:
    def run(told: dict[str, bytes] | None = None) -> tuple[Any, dict[str, bytes]]:
        meter: Any = Average(total=torch.zeros(2), mean=np.zeros(3), shadow={"w": torch.ones(2)}, ema=None, odd=ODD)
        variables = following(Keepers([sys._getframe(0)], []))
        before, total = variables.take(), meter.total
        if told is not None:
            variables.receive(told)
            return meter, variables.encoded()
        meter.total += 1
        meter.mean, meter.ema, meter.shadow["w"] = meter.mean + 2, torch.ones(1), meter.shadow["w"] * 3
        sent = variables.encoded()  # a name that is not put back itself
        variables.put_back(before)
        assert meter.total is total and variables.notes == []
        return meter, sent

    (mine, told), untouched = run(), run({})[0]
    assert mine.total.eq(0).all() and not mine.mean.any() and mine.shadow["w"].eq(1).all()
    assert mine.ema is untouched.ema is None
    other, again = run(told)
    assert other.total.eq(1).all() and other.mean.tolist() == [2.0] * 3
    assert other.ema.eq(1).all() and other.shadow["w"].eq(3).all() and other.odd is ODD
    assert told.keys() <= again.keys()


ODD = torch.eye(3).to_sparse()


@pytest.mark.parametrize("held", ["model", "set of parameters", "many parameters", "wrapped", "method", "data set"])
def test_arrays_of_what_leads_to_protected_state_are_left_alone(held: str) -> None:
    net = nn.Linear(1, 1)
    around: dict[str, Any] = {
        "model": Average(inner=Average(net=net)),
        "set of parameters": {*net.parameters()},
        "many parameters": [0.0, *net.parameters()] * 200,
        "wrapped": nn.Sequential(net),
        "method": net.zero_grad,
    }
    it = Samples() if held == "data set" else Average(total=torch.zeros(1), inside=around.get(held))
    frame: Any = SimpleNamespace(f_locals={"it": it, "alone": Average()}, f_globals={})
    carries = {each.name: each.carries for each in keepers([frame], [net])}
    assert (carries["object it"], carries["object alone"]) == (False, True)


class Samples(Dataset[int]):
    """Looked after by its loader."""

    def __init__(self) -> None:
        self.all = torch.zeros(5)


def test_arrays_of_objects_are_followed_up_to_a_bound_for_all_together() -> None:
    many = [Average(total=torch.zeros(1 << 20)) for _ in range(6)]
    frame: Any = SimpleNamespace(f_locals={"many": many}, f_globals={})
    assert [each.carries for each in keepers([frame], []) if each.name.startswith("object many[")] == [True] * 4 + [
        False
    ] * 2


@dataclasses.dataclass(frozen=True)
class Frozen:
    """Made anew by each body."""

    total: Any
    count: int = 0


def test_an_object_that_stands_where_another_was_is_followed_though_that_one_is_still_there() -> None:
    state = previous = Frozen(torch.zeros(1))
    variables = following(Keepers([sys._getframe(0)], []))
    for number in range(3):
        before = variables.take()
        previous, state = state, Frozen(state.total + 1, state.count + 1)  # of a body that is cut off
        variables.put_back(before)
        assert (float(state.total), state.count) == (number, number)
        previous, state = state, Frozen(state.total + 1, state.count + 1)
    assert previous is not state
    assert {"object state\ntotal", "object state\ncount"} <= variables.encoded().keys()


def test_what_the_rehearsal_has_made_is_followed_behind_it() -> None:
    meters: dict[str, Average] = {}
    variables = following(Keepers([sys._getframe(0)], []))
    variables.take()
    meters["loss"] = Average()
    variables.places.objects.leave_alone({})
    assert any("meters" in name for name in variables.take())


def test_a_newcomer_tells_what_is_beyond_the_bounds() -> None:
    many, others = [SimpleNamespace(count=at) for at in range(250)], [SimpleNamespace(count=0) for _ in range(20)]
    variables = following(Keepers([sys._getframe(0)], []))
    variables.take()
    assert variables.notes == [] and many and others
    variables.is_newcomer = True
    variables.receive({})
    (note,) = variables.notes
    assert "all beyond 256 things" in note


def test_what_is_told_fits_into_one_message() -> None:
    grown = SimpleNamespace(**{f"part{at}": [torch.zeros(1)] for at in range(8)})
    variables = following(Keepers([sys._getframe(0)], []))
    variables.take()
    for parts in vars(grown).values():
        parts[0] = torch.ones(1_900_000)
    told = variables.encoded()
    beyond = {place for place in told if place.startswith("\t")}
    assert len(told) == 8 and sum(map(len, told.values())) < 48 << 20
    assert beyond == {"\tobject grown\npart6", "\tobject grown\npart7"}
