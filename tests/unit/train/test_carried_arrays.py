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
from regrow.train.rehearsal.players import shows
from regrow.train.rehearsal.unprotected_changes import Unprotected
from regrow.train.script.callers import script_frames
from regrow.train.script.filled_anew import harmless
from regrow.train.script.read_first import ReadOrder
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
    game.reset()
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


class Chained(EarlyStopping):
    """Its `reset` can be called in a row with others."""

    def reset(self) -> "Chained":  # type: ignore[override]
        self.count = 0
        return self


class Best(EarlyStopping):
    """Its `reset` says what the best was."""

    def reset(self) -> float:  # type: ignore[override]
        self.count = 0
        return 0.5 + self.count


@pytest.mark.parametrize("kind", [EarlyStopping, Chained, Best])
def test_an_early_stopper_is_no_environment_that_shows_something(kind: type[EarlyStopping]) -> None:
    total, losses, stopping = torch.zeros(1), [torch.ones(1)], kind()
    stopping.reset()
    for _ in steps(stopping):
        losses.append(total.detach())
        total = total + losses[-1]
        stopping.step(1.0)
    assert total == 0 and len(losses) == 2
    assert shows(Game()) and not shows(Chained())


def test_an_environment_that_no_step_changes_is_none_of_the_training() -> None:
    game, total = Game(), torch.zeros(1)
    for _ in steps(game):
        total = total + 1
    assert total == 1


def test_lists_that_are_only_added_to_are_not() -> None:
    game, losses, told = Game(), [torch.ones(1)], {"loss": [torch.ones(1)]}
    for _ in steps(game):
        seen = game.step(1.0)
        losses.append(torch.from_numpy(seen))
        told["loss"].append(torch.from_numpy(seen))
    assert len(losses) == 2


def test_a_storage_that_each_body_fills_as_a_whole_is_not() -> None:
    game, options = Game(), SimpleNamespace(turns=4)
    storage, rewards, memory = torch.zeros(4, 2), torch.zeros(4), SimpleNamespace(seen=np.zeros(2))
    whole = torch.zeros(2)
    for _ in steps(game, memory):
        for turn in range(0, options.turns):
            storage[turn] = torch.from_numpy(memory.seen)
            with torch.no_grad():
                rewards[turn] = storage[turn].sum()
            memory.seen = game.step(1.0)
        whole[:] = storage.mean(0) + rewards.mean()
    assert whole.sum() > 0


def test_a_storage_of_which_a_body_fills_a_part_is_refused() -> None:
    game, storage = Game(), torch.ones(5, 2)
    with pytest.raises(UsageError, match="changes arrays in `storage`"):
        for _ in steps(game):
            for turn in range(4):
                storage[turn] = torch.from_numpy(game.step(1.0))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a.append(b)", {"a"}),
        ("if b:\n    a.append(b)\nc = len(a)", set()),
        ("for t in range(3):\n    s[t] = b\nc = s.sum()", {"s"}),
        ("for t in range(3):\n    s[t] = b + s[t]", set()),
        ("for t in range(3):\n    s[t] = b\n    q = s[t - 1]", set()),
        ("for t in range(3):\n    if b:\n        continue\n    s[t] = b", set()),
        ("for t in range(3):\n    if b:\n        s[t] = b", set()),
        ("for t in range(2):\n    s[t] = b", set()),
        ("c = s.sum()\nfor t in range(3):\n    s[t] = b", set()),
        ("s[...] = b", {"s"}),
        ("s[0] = b", set()),
        ("s.zero_()\ns[b] += 1", {"s"}),
    ],
)
def test_names_whose_old_content_no_body_reads(text: str, expected: set[str]) -> None:
    assert harmless(ast.parse(text).body, {"a": [], "s": torch.zeros(3), "b": 1}) == expected


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
    order = ReadOrder()
    order.block(ast.parse(text).body, set())
    assert order.read == expected
