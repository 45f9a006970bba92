"""Arrays that one body hands to the next are refused by name in scripts with environments, unless protected."""

import ast
import sys
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from regrow.core.errors import UsageError
from regrow.train.rehearsal.callers import script_frames
from regrow.train.rehearsal.read_first import names_read_first
from regrow.train.rehearsal.unprotected_changes import Unprotected
from regrow.train.state.protected import ProtectedState


class Game:
    def __init__(self) -> None:
        self.place = np.zeros(2)

    def reset(self) -> np.ndarray:
        self.place = np.zeros(2)
        return self.place

    def step(self, action: float) -> np.ndarray:
        self.place = self.place + action + 1
        return self.place


class Storage:
    def __init__(self) -> None:
        self.moves: deque[np.ndarray] = deque(maxlen=9)


class EarlyStopping:
    """Has the form of an environment, but shows nothing."""

    def __init__(self) -> None:
        self.count = 0

    def reset(self) -> None:
        self.count = 0

    def step(self, loss: float) -> bool:
        self.count += loss > 0
        return self.count > 3

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def steps(*protected: object) -> Iterator[int]:
    """A loop's first turn, between two looks."""
    net = nn.Linear(2, 1)
    objects = [net, torch.optim.SGD(net.parameters(), lr=0.1), *protected]
    frames = [frame for frame in script_frames(sys._getframe(1)) if frame.f_code.co_filename == __file__][:1]
    looking = Unprotected(ProtectedState(objects), objects, frames, first=True)
    yield 0
    looking.refuse_changed()


def handed_on() -> None:
    game = Game()
    seen = game.reset()
    for _ in steps(game):
        for _ in range(3):
            seen = game.step(float(seen.sum()))


def handed_on_from_nothing() -> None:
    game, seen = Game(), None
    for _ in steps(game):
        if seen is None:
            seen = game.reset()
        seen = game.step(1.0)


def handed_on_in_a_dictionary() -> None:
    game = Game()
    seen: dict[str, Any] = {"first": game.reset()}
    for _ in steps(game):
        seen["first"] = torch.from_numpy(game.step(1.0).copy())


def kept_in_a_storage() -> None:
    game, storage = Game(), Storage()
    for _ in steps(game):
        storage.moves.append(game.step(1.0))


ring = np.zeros(4)


def kept_by_a_function() -> None:
    game = Game()

    def keep() -> None:
        global ring
        ring = ring + game.step(1.0).sum()

    for _ in steps(game):
        keep()


@pytest.mark.parametrize(
    ("script", "name"),
    [
        (handed_on, "seen"),
        (handed_on_from_nothing, "seen"),
        (handed_on_in_a_dictionary, "seen"),
        (kept_in_a_storage, "storage"),
        (kept_by_a_function, "ring"),
    ],
)
def test_what_the_next_body_begins_with_is_refused_by_name(script: Callable[[], None], name: str) -> None:
    with pytest.raises(UsageError, match=f"changes arrays in `{name}`") as refused:
        script()
    assert f"SimpleNamespace({name}=...)" in str(refused.value)


def test_what_each_body_makes_anew_is_not() -> None:
    game, seen, loss = Game(), np.ones(2), torch.ones(1)
    for _ in steps(game):
        seen = game.reset()
        for _ in range(3):
            seen = game.step(float(seen.sum()))
        loss = torch.from_numpy(seen) * 2
    assert loss.sum() > 0


def test_what_is_protected_is_not() -> None:
    game, storage, memory = Game(), Storage(), SimpleNamespace(seen=np.zeros(2))
    for _ in steps(game, storage, memory):
        memory.seen = game.step(float(memory.seen.sum()))
        storage.moves.append(memory.seen)


def test_scripts_without_environments_are_left_alone() -> None:
    total, stopping = torch.zeros(1), EarlyStopping()
    for _ in steps(stopping):
        total = total + 1
        stopping.step(1.0)
    assert total == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a = b\nb = a", {"b"}),
        ("if x:\n    a = 1\nprint(a)", {"x", "a", "print"}),
        ("if x:\n    a = 1\nelse:\n    a = 2\nf(a)", {"x", "f"}),
        ("for t in r:\n    s = g(o)\n    o = s\nu = s", {"r", "g", "o"}),
        ("total += x", {"total", "x"}),
        ("with m as n:\n    k = n\nf = [i for i in k]\nz[0] = f", {"m", "z"}),
        ("try:\n    a = 1\nexcept E:\n    b = c\nq = a", {"E", "c"} - {"E"}),
        ("f = lambda v: v + w", {"w"}),
    ],
)
def test_names_that_are_read_first(text: str, expected: set[str]) -> None:
    assert names_read_first(ast.parse(text).body) == expected
