"""Callers of the steps: iterators that count them in between, and loops around the loop."""

import argparse
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tqdm import tqdm

from regrow.train.script.callers import counted_by, loop_around, script_frames


class Steps:
    """An iterator that asks who counts it at its first item."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def run(self) -> Iterator[int]:
        """Two items."""
        self.iterator = self._run()
        return self.iterator

    def _run(self) -> Iterator[int]:
        yield from self._rehearse()
        yield 1

    def _rehearse(self) -> Iterator[int]:
        self.found.append(counted_by(self.iterator))
        yield 0


def through_a_generator(steps: Iterator[int]) -> Iterator[int]:
    yield from steps


@pytest.mark.parametrize(
    ("wrap", "found"),
    [
        (enumerate, "enumerate(...)"),
        (lambda steps: zip(steps, range(9), strict=False), "zip(...)"),
        (lambda steps: itertools.islice(steps, 5), "itertools.islice(...)"),
        (lambda steps: enumerate(tqdm(steps, disable=True)), "enumerate(...)"),
        (lambda steps: tqdm(enumerate(steps), disable=True), "enumerate(...)"),
        (lambda steps: enumerate(through_a_generator(through_a_generator(steps))), "enumerate(...)"),
        (lambda steps: (pair for pair in enumerate(map(str, steps))), "enumerate(...)"),
        (lambda steps: steps, ""),
        (lambda steps: tqdm(steps, disable=True), ""),
        (lambda steps: map(str, steps), ""),
        (lambda steps: itertools.groupby(steps, lambda number: number // 2), "itertools.groupby(...)"),
        (itertools.pairwise, "itertools.pairwise(...)"),
        (lambda steps: filter(None, steps), ""),
    ],
)
def test_what_counts_the_steps_is_named_and_what_passes_them_on_is_not(
    wrap: Callable[[Iterator[int]], Iterator[Any]], found: str
) -> None:
    steps = Steps()
    for _ in wrap(steps.run()):
        pass
    assert steps.found == [found]


def test_an_iterator_that_counts_something_else_is_not_named() -> None:
    steps = Steps()
    for _ in enumerate([1]):
        for _ in steps.run():
            pass
    assert steps.found == [""]


def around() -> bool:
    return loop_around(script_frames()) is not None


def within(call: Callable[[], bool]) -> bool:
    """One frame further in."""
    return call()


def test_a_call_in_the_body_of_a_for_loop_has_a_loop_around_it() -> None:
    for _ in range(2):
        try:
            found = within(around)
        except ValueError:
            continue
        for _ in range(2):
            pass
    assert found
    assert [around() for _ in range(2)] == [True, True]


def test_a_call_that_is_made_once_has_none() -> None:
    for _ in range(2):
        pass
    assert not around()
    for _ in itertools.repeat(None, 3 if not around() else 0):
        pass
    while True:
        found = around()
        if not found:
            break
    for _ in range(2):
        found = around()
        break
    assert not found


def test_a_loop_that_is_seen_to_have_one_turn_is_none() -> None:
    epochs, options, folds = 1, argparse.Namespace(epochs=1, start=4), (3,)
    for epoch in range(1):
        assert not around(), epoch
    for _ in range(epochs):
        for _ in [folds]:
            assert not within(around)
    for _ in range(4, 5):
        assert not around()
    for _ in range(options.epochs):
        assert not around()


def test_a_loop_that_may_have_another_turn_is_one_whatever_it_had() -> None:
    epochs, options = 1, argparse.Namespace(epochs=1)
    for _ in range(epochs):
        assert around()
        epochs = 1
    for _ in range(options.epochs):
        assert around()
        options.epochs = 1
    for _ in iter([1]):
        assert around()
    more = [1]
    for _ in more:
        assert around(), "it may be appended to"
    for _ in range(1):
        for _ in range(2):
            assert around()
    for _ in range(1):
        assert [around() for _ in range(2)] == [True, True]
    for _ in range(2):
        for _ in range(1):
            assert around()
