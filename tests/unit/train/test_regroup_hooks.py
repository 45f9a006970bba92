"""Hooks of what a script builds on its groups: their order, their errors, and what they may do."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from regrow.comm.groups import Groups
from regrow.comm.observers import CallObserver
from regrow.core.board import Board
from regrow.core.errors import UsageError
from regrow.core.phase import Phase
from regrow.train.hooks.regroups import RegroupHooks
from regrow.train.session import Session
from regrow.train.worker.standalone import StandaloneWorker
from regrow.train.worker.stray_calls import Beside


class Member:
    """A worker whose groups are of the generation that a test says."""

    def __init__(self, *, newcomer: bool = False) -> None:
        self.groups, self.newcomer, self.body = SimpleNamespace(generation=1), newcomer, MagicMock()
        self.notes: list[str] = []

    @contextmanager
    def beside(self, hook: str, within: float, *, calls: bool) -> Iterator[None]:
        yield

    def note_of_script(self, text: str) -> None:
        self.notes.append(text)


def hooks(member: Member) -> RegroupHooks:
    return RegroupHooks(member)  # type: ignore[arg-type]


def test_they_are_called_in_order_and_given_up_in_reverse_and_once_a_generation() -> None:
    member, called = Member(), list[tuple[str, int]]()
    mine = hooks(member)
    for name in ("a", "b"):
        mine.add(
            lambda generation, name=name: called.append((f"before {name}", generation)),  # type: ignore[misc]
            lambda generation, name=name: called.append((f"after {name}", generation)),  # type: ignore[misc]
            within=1.0,
        )
    assert mine.call_after_hooks(MagicMock())
    mine.give_up()
    mine.give_up()
    member.groups.generation = 4
    assert mine.call_after_hooks(MagicMock()) and mine.call_after_hooks(MagicMock())
    assert called == [("after a", 1), ("after b", 1), ("before b", 1), ("before a", 1), ("after a", 4), ("after b", 4)]


def test_a_newcomer_builds_when_it_stands_and_has_nothing_to_give_up_before() -> None:
    member, called = Member(newcomer=True), list[str]()
    mine = hooks(member)
    mine.add(lambda _: called.append("before"), lambda generation: called.append(f"after {generation}"), within=1.0)
    mine.give_up()
    assert called == []
    member.groups.generation = 3
    mine.call_after_hooks(MagicMock())
    assert called == ["after 3"]


def test_an_error_of_before_is_told_and_the_others_are_given_up_all_the_same() -> None:
    member, called = Member(), list[int]()

    def fails(_: int) -> None:
        raise ConnectionError("the neighbour is gone")

    mine = hooks(member)
    mine.add(called.append, None, within=1.0)
    mine.add(fails, None, within=1.0)
    mine.give_up()
    assert called == [1]
    (note,) = member.notes
    assert "fails of session.on_regroup raised ConnectionError: the neighbour is gone" in note


def test_what_after_has_half_built_is_given_up_and_its_error_named() -> None:
    member, given_up, failing = Member(newcomer=True), list[int](), [True]

    def build(_: int) -> None:
        if failing:
            failing.clear()
            raise OSError("no address")

    mine = hooks(member)
    mine.add(given_up.append, build, within=1.0)
    member.groups.generation = 2
    assert not mine.call_after_hooks(MagicMock())
    (error, _), _ = member.body.abort.call_args
    assert "`after` hook" in error.__notes__[0] and "generation 2" in error.__notes__[0]
    mine.give_up()
    assert given_up == [2]
    member.groups.generation = 3
    assert mine.call_after_hooks(MagicMock())


def test_an_error_in_the_set_up_is_the_scripts() -> None:
    def build(_: int) -> None:
        raise OSError("no address")

    with pytest.raises(OSError, match="no address"):
        hooks(Member()).add(None, build, within=1.0)


def test_alone_it_is_built_at_once_and_asked_for_before_the_loop() -> None:
    session, built = Session(StandaloneWorker(0, 0, 1), seed=0), list[int]()
    session.on_regroup(after=built.append)
    assert built == [0]
    with pytest.raises(UsageError, match="nothing to call"):
        session.on_regroup()
    session._loop.started = True
    with pytest.raises(UsageError, match="after steps"):
        session.on_regroup(after=built.append)


# --- what a hook may do ------------------------------------------------------------------------------------------


class Heard(CallObserver):
    """Notes the calls, not those of hooks."""

    def __init__(self, told: list[str]) -> None:
        self._told = told

    def called(self, name: str, size: int) -> None:
        self._told.append(name)


@pytest.fixture
def groups() -> Iterator[Groups]:
    made = Groups()
    made.install(rank=0, world=1, formation=None, form_s=10.0)
    yield made
    made.close()


@pytest.fixture
def board() -> Board:
    return Board.create()[0]


def test_collectives_are_plain_in_it_and_refused_once_the_groups_are_given_up(groups: Groups, board: Board) -> None:
    told: list[str] = []
    groups.observers = (Heard(told),)
    groups.between = cast(Any, SimpleNamespace(work_of=lambda _: pytest.fail("it is no call between two steps")))
    beside = Beside(board, groups, told.append)
    with beside.run("the hook", 60.0, calls=True):
        dist.all_reduce(torch.ones(1))
    assert told == []
    with pytest.raises(UsageError, match="allreduce was called in the hook"), beside.run("the hook", 60.0, calls=False):
        dist.all_reduce(torch.ones(1))
    groups.between = None
    dist.all_reduce(torch.ones(1))
    assert told == ["allreduce"]


def test_it_makes_and_destroys_no_groups(groups: Groups, board: Board) -> None:
    mine = dist.new_group([0])
    beside = Beside(board, groups, lambda _: None)
    with beside.run("the hook", 60.0, calls=True):
        with pytest.raises(UsageError, match="the hook makes a group"):
            dist.new_group([0])
        with pytest.raises(UsageError, match="the hook destroys a group"):
            groups.destroy(groups._groups[-1])
    dist.all_reduce(torch.ones(1), group=mine)


def test_random_numbers_that_it_draws_count_for_nothing(groups: Groups, board: Board) -> None:
    def drawn() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(1))

    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(3)
    expected = drawn()
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(3)
    with Beside(board, groups, lambda _: None).run("the hook", 60.0, calls=True):
        drawn()
    assert drawn() == expected


def test_it_counts_as_progress_until_its_limit_which_is_told(groups: Groups, board: Board) -> None:
    board.enter(Phase.OUTSIDE)
    before = board.read().beats
    told: list[str] = []
    beside = Beside(board, groups, told.append)
    beside._beat(MagicMock(wait=lambda _: False), "the hook", 0.01)
    assert board.read().beats > before and board.read().phase is Phase.RECOVERING
    assert told == ["the hook has run for 0 s, and may be taken for hanging from now on"]
    board.enter(Phase.BUILDING)
    with beside.run("the hook", 60.0, calls=True):
        pass
    assert board.read().phase is Phase.BUILDING
