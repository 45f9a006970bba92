"""Observers of collectives: the order of their moments, the refusals, and the calls that are not made."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from regrow.comm.groups import Groups
from regrow.comm.observers import CallObserver, CountedGroup, Moments
from regrow.comm.process_group import RegrowGroup
from regrow.comm.torch_private.nccl_group import Wanted
from regrow.core.errors import UsageError


class Observer(CallObserver):
    """Hears of all moments."""

    def __init__(self, name: str, heard: list[str], refuses: str = "") -> None:
        self._name, self._heard, self._refuses = name, heard, refuses

    def _hear(self, moment: str) -> None:
        if moment == self._refuses:
            raise UsageError(f"{self._name} refuses", hint="none")
        self._heard.append(f"{self._name} {moment}")

    def called(self, name: str, size: int) -> None:
        self._hear(f"called {name} of {size}")

    def starts(self, group: CountedGroup, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        self._hear(f"starts {name} after {group.calls}")

    def answered(self, name: str) -> None:
        self._hear(f"answered {name}")


class Starts(CallObserver):
    """Hears of one moment."""

    def starts(self, group: CountedGroup, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """It does nothing."""


@pytest.fixture
def made() -> Callable[..., tuple[RegrowGroup, list[str]]]:
    def make(*refuses: str) -> tuple[RegrowGroup, list[str]]:
        groups, heard = Groups(), list[str]()
        group = RegrowGroup(groups, Wanted("pair", [0, 1]), 0, run_s=60.0)
        call = lambda name, *_: heard.append(f"sent {name}")  # noqa: E731
        group.transport = cast(Any, SimpleNamespace(call=call))
        groups.observers = tuple(Observer(name, heard, refused) for name, refused in zip("ab", refuses, strict=True))
        return group, heard

    return make


def test_each_moment_comes_to_all_of_them_in_their_order(made: Callable[..., tuple[RegrowGroup, list[str]]]) -> None:
    group, heard = made("", "")
    group.forward("barrier", (), {})
    moments = ("called barrier of 2", "starts barrier after 0", "answered barrier")
    told = [f"{name} {moment}" for moment in moments for name in "ab"]
    assert heard == [*told[:4], "sent barrier", *told[4:]]
    group.forward("barrier", (), {})
    assert "a starts barrier after 1" in heard


@pytest.mark.parametrize("moment", ["called barrier of 2", "starts barrier after 0"])
def test_an_error_of_one_refuses_the_call_which_counts_for_nothing(
    made: Callable[..., tuple[RegrowGroup, list[str]]], moment: str
) -> None:
    group, heard = made("", moment)
    with pytest.raises(UsageError, match="b refuses"):
        group.forward("barrier", (), {})
    assert "sent barrier" not in heard and group.calls == 0
    assert heard[-1] == f"a {moment}"


def test_only_what_an_observer_overrides_is_called() -> None:
    mine = Starts()
    assert Moments.of([mine]) == Moments(starts=(mine.starts,))
    assert Moments.of([]) == Moments()
