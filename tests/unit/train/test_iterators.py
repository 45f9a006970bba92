"""Detection of a read from an iterator that a script keeps for itself, whatever kind it is."""

import itertools
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from regrow.core.errors import UsageError
from regrow.train.rehearsal.iterators import advanced, is_iterator, position
from regrow.train.rehearsal.unprotected_changes import Unprotected
from regrow.train.state.protected import ProtectedState

ROWS = list(range(90))


class Endless(DataLoader[int]):
    """A loader that is its own iterator, as picotron's."""

    def __init__(self) -> None:
        super().__init__(ROWS, batch_size=2)  # type: ignore[arg-type]
        self._walk = super().__iter__()

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        return next(self._walk)


def numbers() -> Iterator[torch.Tensor]:
    for each in ROWS:
        yield torch.tensor(each)


def counted(at: int = 0) -> Iterator[int]:
    while True:
        at += 1
        yield at


def handed_on() -> Iterator[torch.Tensor]:
    yield from numbers()


def batches(**options: Any) -> Iterator[Any]:
    return iter(DataLoader(ROWS, batch_size=2, **options))  # type: ignore[arg-type]


KINDS: dict[str, Callable[[], Iterator[Any]]] = {
    "a generator": numbers,
    "a generator without an end": counted,
    "a generator of a generator": handed_on,
    "a generator expression": lambda: (each for each in ROWS),
    "a list's": lambda: iter(ROWS),
    "a range's": lambda: iter(range(90)),
    "a loader's": batches,
    "a loader's with workers": lambda: batches(num_workers=1),
    "a loader that is its own": Endless,
    "zip": lambda: zip(iter(ROWS), numbers(), strict=False),
    "map": lambda: map(str, numbers()),
    "enumerate": lambda: enumerate(ROWS),
    "count": itertools.count,
    "cycle": lambda: itertools.cycle(batches()),
    "islice": lambda: itertools.islice(counted(), 50),
    "chain": lambda: itertools.chain([1, 2], numbers()),
}


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_seen_each_time_that_something_is_taken(kind: str) -> None:
    iterator = KINDS[kind]()
    assert is_iterator(iterator)
    for _ in range(4):
        before = position(iterator)
        assert not advanced(before, position(iterator))
        next(iterator)
        assert advanced(before, position(iterator))


def test_files_and_what_can_be_gone_through_again_are_no_iterators() -> None:
    with tempfile.TemporaryFile() as file:
        loader: DataLoader[int] = DataLoader(ROWS)  # type: ignore[arg-type]
        assert not any(map(is_iterator, (file, ROWS, loader, {}, "", numbers)))


def test_a_body_that_takes_from_an_iterator_of_the_scripts_own_is_refused_by_its_name() -> None:
    net = nn.Linear(2, 1)
    kept = {"train": numbers()}
    unprotected = Unprotected(ProtectedState([net]), [net], [sys._getframe()])
    unprotected.refuse_taken()
    next(kept["train"])
    with pytest.raises(UsageError, match=r"takes from `kept\['train'\]` \(generator\), an iterator"):
        unprotected.refuse_taken()


def test_the_scripts_own_way_around_the_steps_is_the_loop_and_not_taken_from() -> None:
    ours = types.FunctionType(numbers.__code__, numbers.__globals__ | {"__name__": "regrow.train.session"})
    net, kept = nn.Linear(2, 1), {"steps": map(str, ours())}
    unprotected = Unprotected(ProtectedState([net]), [net], [sys._getframe()])
    next(kept["steps"])
    unprotected.refuse_taken()


def test_a_protected_object_that_tells_its_place_may_be_taken_from() -> None:
    class Stream:
        def __init__(self) -> None:
            self.at, self.numbers = 0, counted()

        def __next__(self) -> int:
            self.at = next(self.numbers)
            return self.at

        def state_dict(self) -> dict[str, int]:
            return {"at": self.at}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.at, self.numbers = state["at"], counted(state["at"])

    stream, net = Stream(), nn.Linear(2, 1)
    unprotected = Unprotected(ProtectedState([net]), [net, stream], [sys._getframe()])
    next(stream)
    unprotected.refuse_taken()
