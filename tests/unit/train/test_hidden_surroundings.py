"""State of a script that attributes do not show, and the names under which it is reported."""

import ctypes
import hashlib
import random
import sqlite3
import sys
import types
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import nn

from regrow.core.ids import Rank, StepNo
from regrow.train.proving.hidden import hooks, put_in_place, settings
from regrow.train.proving.naming import likely
from regrow.train.proving.surroundings import surroundings
from regrow.train.proving.trace import SeenAround, Trace

TEMPERATURE: ContextVar[float] = ContextVar("temperature", default=2.0)


class Slotted:
    __slots__ = ("random",)

    def __init__(self) -> None:
        self.random = random.Random(0)


def held(value: object) -> dict[str, SeenAround]:
    frame = types.SimpleNamespace(f_locals={"thing": value})
    # Modules of all tests in this process would take the time that such a look may last.
    with patch("regrow.train.proving.surroundings.modules_of_script", lambda: [sys.modules[__name__]]):
        found = surroundings([frame], ())  # type: ignore[list-item]
    return {path: seen for path, seen in found.items() if path.startswith("thing")}


def database() -> sqlite3.Connection:
    made = sqlite3.connect(":memory:")
    made.execute("create table seen (loss real)")
    return made


def weakly(key: object) -> "WeakKeyDictionary[object, list[torch.Tensor]]":
    return WeakKeyDictionary({key: [torch.zeros(2)]})


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (lambda _: TEMPERATURE, lambda var: var.set(var.get() * 0.9)),
        (lambda _: database(), lambda made: made.execute("insert into seen values (1.0)")),
        (lambda _: hashlib.sha256(), lambda chain: chain.update(b"x")),
        (lambda _: ctypes.c_long(0), lambda number: setattr(number, "value", 5)),
        (lambda path: (path / "book").open("rb"), lambda book: book.read(3)),
        (lambda _: [Slotted()], lambda things: things[0].random.random()),
        (lambda _: weakly(Slotted), lambda kept: kept[Slotted][0].add_(1)),
    ],
    ids=["context", "database", "hash", "ctypes", "file", "slots", "weak keys"],
)
def test_what_is_written_in_c_is_looked_at(
    make: Callable[[Path], Any], change: Callable[[Any], object], tmp_path: Path
) -> None:
    (tmp_path / "book").write_text("words")
    value = make(tmp_path)
    before = held(value)
    assert held(value) == before
    change(value)
    assert held(value) != before


def test_torchs_settings_are_seen() -> None:
    before = dict(settings())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        within = dict(settings())
    assert [name for name in before if before[name] != within[name]] == ["torch.is_autocast_enabled()"]


def test_a_hook_of_what_is_protected_is_told_by_its_function() -> None:
    def shrink(module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
        return output * 0.5

    net = nn.Linear(1, 1)
    before = dict(hooks([("net", net)]))
    net.register_forward_hook(shrink)
    changed = {name: seen.text for name, seen in hooks([("net", net)]) if seen != before[name]}
    assert list(changed) == ["the forward hooks of net"] and "shrink" in changed["the forward hooks of net"]


def test_a_function_of_a_library_that_was_patched_is_seen() -> None:
    library = types.ModuleType("library")
    exec("def loss(): ...\ndef other(): ...", vars(library))
    assert not list(put_in_place("library", library))
    vars(library)["loss"] = vars(library)["other"]
    assert [name for name, _ in put_in_place("library", library)] == ["library.loss"]


def test_what_only_a_library_reads_is_known_by_what_holds_it() -> None:
    rank = Trace(
        StepNo(7), around={"points.num_generated": SeenAround(1, "count", "8"), "other.x": SeenAround(1, "list")}
    )
    newcomer = Trace(
        StepNo(7),
        around={"points.num_generated": SeenAround(2, "count", "1"), "other.x": SeenAround(2, "list")},
        used=["points", ".draw"],
    )
    assert likely(rank, newcomer, Rank(1)) == ["`points.num_generated` (8 on rank 1, 1 there), a counter"]
