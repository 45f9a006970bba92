"""Changes by an environment's steps are seen, whoever wrote its class; those of a clock or a library are not."""

import collections
import copy
import random
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from regrow.core.errors import UsageError
from regrow.train.rehearsal.environments import difference, is_environment, look
from regrow.train.rehearsal.unprotected_changes import Unprotected
from regrow.train.state.protected import ProtectedState


class Game:
    """A game of the script's own."""

    def __init__(self, generator: Any) -> None:
        self.generator, self.place, self.began = generator, np.zeros(2), time.time()
        self.last: collections.deque[int] = collections.deque(maxlen=4)

    def reset(self) -> Any:
        return self.place

    def step(self, action: int) -> Any:
        return self.place


class Vector:
    """As a library has it: environments, and buffers of its own."""

    def __init__(self, games: list[Game]) -> None:
        self.envs, self.episodes = tuple(games), [0 for _ in games]
        self._clock = SimpleNamespace(now=time.monotonic())

    def reset(self, *, seed: int | None = None) -> None: ...

    def step(self, actions: list[int]) -> None: ...


Vector.__module__ = "gymnasium.vector"


def vector(generator: Any = None) -> Vector:
    return Vector([Game(generator or random.Random(3)), Game(random.Random(4))])


def draw(envs: Vector) -> None:
    generator = envs.envs[0].generator
    torch.rand(3, generator=generator) if isinstance(generator, torch.Generator) else generator.random()


@pytest.mark.parametrize(
    ("generator", "change", "path"),
    [
        (None, draw, "envs[0].generator"),
        (np.random.default_rng(1), draw, "envs[0].generator"),
        (np.random.RandomState(1), lambda envs: envs.envs[0].generator.rand(), "envs[0].generator"),
        (torch.Generator(), draw, "envs[0].generator"),
        (None, lambda envs: envs.envs[1].place.__iadd__(1), "envs[1].place"),
        (None, lambda envs: envs.envs[1].last.append(3), "envs[1].last[0]"),
        (None, lambda envs: envs.episodes.__setitem__(1, 2), "episodes[1]"),
        (None, lambda envs: setattr(envs.envs[0], "lives", None), "envs[0].lives"),
    ],
)
def test_a_change_anywhere_in_a_vector_of_environments_is_named(generator: Any, change: Any, path: str) -> None:
    envs = vector(generator)
    before = look(envs)
    assert difference(before, look(envs)) == ""
    change(envs)
    assert difference(before, look(envs)) == path


def test_a_change_below_as_many_wrappers_as_a_game_of_atari_has_is_named() -> None:
    game = wrapped = Game(random.Random(3))
    for _ in range(16):
        wrapped = SimpleNamespace(env=wrapped)  # type: ignore[assignment]
    envs = Vector([wrapped])
    before = look(envs)
    game.place += 1
    assert difference(before, look(envs)) == "envs[0]" + ".env" * 16 + ".place"


def test_what_a_clock_says_is_no_change() -> None:
    envs = vector()
    before = look(envs)
    envs.envs[0].began, envs._clock.now = time.time(), time.monotonic()
    assert difference(before, look(envs)) == ""


def test_what_has_the_form_of_an_environment() -> None:
    class Timer:
        def reset(self) -> None: ...

        def step(self) -> None: ...

    net = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    others = [Timer(), net, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1), Game, torch.profiler.profile()]
    assert [is_environment(each) for each in (vector(), Game(None), *others)] == [True, True] + [False] * len(others)


# --- among the variables of a script ---------------------------------------------------------------------------------


class Kept(Game):
    """A game that says what its state is; all of it, or without its generator."""

    whole = True

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place} | ({"generator": self._drawn()} if self.whole else {})

    def _drawn(self) -> Any:
        if isinstance(self.generator, random.Random):
            return self.generator.getstate()
        if isinstance(self.generator, torch.Generator):
            return self.generator.get_state()
        return self.generator.bit_generator.state

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def watched(objects: list[object], **locals: Any) -> Unprotected:
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    frame: Any = SimpleNamespace(f_locals=locals, f_globals={})
    return Unprotected(ProtectedState([net, optimizer, *objects]), [net, optimizer, *objects], [frame])


def test_an_environment_that_nobody_protects_is_refused_by_name_with_what_it_changes() -> None:
    envs = vector()
    looking = watched([], envs=envs)
    looking.refuse_changed()
    envs.envs[1].place += 1
    with pytest.raises(UsageError, match=r"changes `envs` \(Vector: its envs\[1\].place\)") as refused:
        looking.refuse_changed()
    assert "state_dict" in str(refused.value) and "protect(..., envs=envs)" in str(refused.value)


@pytest.mark.parametrize("generator", [random.Random, np.random.default_rng, torch.Generator])
@pytest.mark.parametrize("whole", [True, False])
def test_a_generator_in_what_is_protected_is_refused_only_where_its_state_is_left_out(
    generator: Any, whole: bool
) -> None:
    game = Kept(generator())
    game.whole = whole
    looking = watched([game], game=game)
    torch.rand(3, generator=game.generator) if generator is torch.Generator else game.generator.random()
    game.place += 1
    looking.refuse_changed()
    if whole:
        looking.refuse_drawn()
    else:
        with pytest.raises(UsageError, match=r"draws from `game.generator`"):
            looking.refuse_drawn()


def test_a_copy_whose_weights_are_in_the_state_of_a_protected_object_is_protected() -> None:
    class Average:
        def __init__(self) -> None:
            self.ema = nn.Linear(2, 1)
            self.other = copy.deepcopy(self.ema)

        def state_dict(self) -> Any:
            return self.ema.state_dict()

        def load_state_dict(self, state: Any) -> None: ...

    average = Average()
    looking = watched([average], average=average)
    with torch.no_grad():
        average.ema.weight += 1
    looking.refuse_changed()
    with torch.no_grad():
        average.other.weight += 1
    with pytest.raises(UsageError, match=r"changes `average.other`"):
        looking.refuse_changed()


def test_pythons_and_numpys_global_generators_are_nobodys_to_protect() -> None:
    looking = watched([], draw=random.random, module=random, numbers=np.random)
    random.random(), np.random.rand()
    looking.refuse_drawn()


class OfOtherNames(Game):
    """A game that says its state by the other pair of names, with its generator."""

    def get_state(self) -> Any:
        return [self.place, self.generator.getstate()]

    def set_state(self, state: Any) -> None: ...


def test_a_generator_in_a_state_that_get_state_gives_is_protected() -> None:
    game = OfOtherNames(random.Random())
    looking = watched([game], game=game)
    game.generator.random()
    game.place += 1
    looking.refuse_changed()
    looking.refuse_drawn()
