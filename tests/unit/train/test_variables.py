"""A script's own plain variables: which are followed, put back and handed over, and which are left alone."""

import signal
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from regrow.core.ids import StepNo
from regrow.core.messages.replicas import OwnValues
from regrow.hydration.inventory import Inventory
from regrow.train.own_values import left, read
from regrow.train.script.callers import script_frames
from regrow.train.values.variables import Variables

count, window = 0, [0]


class Steps:
    """Gives steps as the loop does: says so to the variables, and takes them."""

    def __init__(self, steps: int = 3) -> None:
        self.variables, self.steps = Variables(), steps
        self.taken: list[dict[str, Any]] = []
        self.encoded: dict[str, bytes] = {}
        self.at: dict[int, Callable[[], None]] = {}
        self.entered_here = True

    def __iter__(self) -> Iterator[int]:
        self.variables.follow(script_frames)
        for number in range(self.steps):
            self.variables.requests_step()
            if number in self.at:
                self.at[number]()
            self.taken.append(self.variables.take())
            if self.entered_here:
                self.variables.enters()
            yield number
        self.encoded = self.variables.encoded()

    def back_to(self, number: int) -> Callable[[], None]:
        """Go back to what was at the begin of a step."""
        return lambda: self.variables.put_back(self.taken[number])


def names(told: dict[str, bytes]) -> set[str]:
    return {place.partition("\n")[2] for place in told}


def test_variables_of_a_function_are_put_back_containers_in_their_place() -> None:
    steps = Steps()
    seen, losses, recent, best, chosen = 0, [0.5], deque([1], maxlen=2), None, "a"
    alias = losses
    steps.at[1] = steps.back_to(0)
    after: list[Any] = []
    for number in steps:
        if number == 1:
            after = [seen, list(losses), list(recent), best, chosen, losses is alias]
        seen += 1
        losses.append(0.25)
        recent.append(seen)
        best, chosen = 0.5, "b"
    assert after == [0, [0.5], [1], None, "a", True]
    assert (seen, losses is alias, list(recent), best, chosen) == (2, True, [1, 2], 0.5, "b")
    assert {"seen", "losses", "recent", "best", "chosen"} <= names(steps.encoded)


def test_variables_of_the_module_are_put_back() -> None:
    global count, window
    count, window = 0, [0]
    steps, mine = Steps(), window
    steps.at[2] = steps.back_to(1)
    for _ in steps:
        count += 1
        window.append(count)
    assert (count, window, window is mine) == (2, [0, 1, 2], True)


def test_variables_that_inner_functions_share_are_put_back() -> None:
    steps, total = Steps(), 0

    def add() -> None:
        nonlocal total
        total += 1

    def run() -> int:
        nonlocal total
        for _ in steps:
            add()
        return total

    steps.at[1] = steps.back_to(0)
    assert run() == total == 2


def test_variables_of_a_generator_around_the_steps_and_of_what_asks_for_them_are_left_alone() -> None:
    steps, first = Steps(), True
    steps.at[1], steps.entered_here = steps.back_to(0), False

    def around() -> Iterator[tuple[int, int]]:
        given = 0
        for number in steps:
            given += 1  # noqa: SIM113
            yield number, given

    given = around()

    def ask(number: int) -> tuple[int, int, int]:
        return (*next(given), number)

    assert ask(0) == (0, 1, 0)
    steps.variables.enters()
    first = False
    assert ask(1) == (1, 2, 1)
    assert first, "what is here was not put back"


def test_what_is_not_plain_at_either_end_is_left_alone() -> None:
    steps = Steps()
    lazy: Any = None
    mixed: list[Any] = []
    functions: list[Any] = [len, min, max]
    sparse, function = torch.zeros(1).to_sparse(), functions[2]
    steps.at[1] = steps.back_to(0)
    for number in steps:
        lazy = lazy if lazy is not None else torch.ones(1)
        mixed.append(torch.ones(1))
        sparse = sparse + torch.ones(1).to_sparse()
        function = functions[number]
    assert lazy is not None and len(mixed) == 2 and float(sparse.to_dense()) == 3 and function is functions[2]
    assert "mixed" in names(steps.encoded) and not names(steps.encoded) & {"sparse", "function"}


def test_what_does_not_change_is_not_told() -> None:
    steps = Steps()
    config, rank = {"lr": 0.1}, 3
    for number in steps:
        mine = f"rank {rank}"
        seen = number
    assert mine and config and seen == 2
    assert names(steps.encoded) & {"config", "rank", "mine", "seen", "number"} == {"seen", "number"}


def test_what_a_clock_says_is_not_told() -> None:
    steps = Steps()
    last, marks, seconds = time.time(), [0.0], 0.0
    for _ in steps:
        last, seconds = time.time(), seconds + 0.5
        marks.append(time.perf_counter())
        stamp = time.time_ns()
    assert last > 0 and stamp > 0
    assert names(steps.encoded) & {"last", "marks", "stamp", "seconds"} == {"seconds"}


def test_what_a_handler_of_signals_sets_is_left_alone() -> None:
    steps, asked = Steps(), 0
    stop: Any = False

    def handler(*_: Any) -> None:
        nonlocal stop
        stop = True

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        steps.at[1] = steps.back_to(0)
        for _ in steps:
            asked += 1
            signal.raise_signal(signal.SIGUSR1)
            assert stop
            stop = stop and asked < 5
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert stop and asked == 2
    assert "stop" not in names(steps.encoded)


def test_a_list_that_grows_large_is_handed_over_and_a_dictionary_is_not() -> None:
    steps = Steps(4)
    losses: list[int] = []
    found: dict[int, int] = {}
    for number in steps:
        losses += range(400)
        found |= dict.fromkeys(range(400 * number, 400 * number + 400), 0)
    assert len(losses) == len(found) == 1600
    assert "losses" in names(steps.encoded) and "found" not in names(steps.encoded)


def train(steps: Steps, upto: int, begin: int = 0) -> list[Any]:
    seen, history, best = begin, [float(begin)], None
    alias = history
    for number in steps:
        if number < upto:
            seen += 1
            history.append(float(seen))
            best = seen
    return [seen, history, best, alias is history]


def test_what_others_have_told_is_taken_over_by_a_newcomer() -> None:
    there, here = Steps(3), Steps(2)
    train(there, 3)
    assert names(there.encoded) == {"seen", "history", "alias", "best", "number"}
    here.at[1] = lambda: here.variables.receive(there.encoded)
    assert train(here, 1) == [3, [0.0, 1.0, 2.0, 3.0], 3, True]


def counted(steps: Steps, body: Callable[[int], None]) -> int:
    seen = 0
    for number in steps:
        seen += 1
        body(number)
    return seen


def test_what_a_script_does_after_a_step_of_the_others_it_does_with_its_own_until_it_asks_again() -> None:
    there, here = Steps(3), Steps(2)
    counted(there, lambda number: None)
    found: list[dict[str, Any]] = []

    def body(number: int) -> None:
        if number == 0:
            here.variables.receive(there.encoded)
            found.append(here.variables.take())
            here.variables.postpone()
            found.append(here.variables.take())

    here.at[1] = lambda: here.variables.put_back(found[0])
    assert counted(here, body) == 3 + 1
    assert [next(values["seen"] for values in each.values() if "seen" in values) for each in found] == [3, 1]


def test_what_differs_between_those_who_have_it_is_not_handed_over() -> None:
    one, other, here = Steps(3), Steps(3), Steps(2)
    train(one, 3)
    train(other, 3, begin=5)
    inventories = [Inventory(StepNo(3), [], b"", each.encoded) for each in (one, other)]
    agreed = inventories[0].agreed(inventories[1:])
    assert names(agreed.variables) == {"number"}
    here.at[1] = lambda: here.variables.receive(agreed.variables)
    assert train(here, 1) == [1, [0.0, 1.0], 1, True]


def test_what_is_told_at_the_end_of_the_loop_stays_so() -> None:
    steps, seen = Steps(5), 0
    for _ in steps:
        seen += 1  # noqa: SIM113
        if seen == 3:
            steps.variables.leave(over=True)
            break
    told = steps.variables.encoded()
    assert {"seen", ""} <= {*names(told), ""} and "" in told
    seen = 99
    assert steps.variables.encoded() == told
    steps.variables.put_back(steps.taken[1])
    assert steps.variables.encoded() != told and "" not in steps.variables.encoded()
    steps.variables.put_back({})
    assert steps.variables.encoded() == told


def test_who_hears_of_a_loop_that_was_left_has_no_step_left_and_says_so_to_others() -> None:
    there, here, third = Variables(), Variables(), Variables()
    there.leave(over=True)
    here.receive(there.encoded())
    assert here.over
    third.receive(here.encoded())
    assert third.over
    third.receive({})  # an older state than that
    assert not third.over


def test_who_has_left_a_loop_whose_step_must_run_again_does_not_say_that_it_is_over() -> None:
    there, here = Variables(), Variables()
    there.leave(over=False)
    here.receive(there.encoded())
    assert not here.over


def test_nothing_of_the_script_is_held_beyond_its_time() -> None:
    steps, gone, last = Steps(), [], []

    def run() -> None:
        mine = iter(steps)
        for number in mine:
            loss = torch.full((3,), number)
            gone.append(weakref.ref(loss))
            if number == 1:
                assert gone[0]() is None, "a tensor of the step before is kept"
                last.append(weakref.ref(mine))
                return

    run()
    assert gone[1]() is None and last[0]() is None, "the loop has not ended with its function"


def test_a_dictionary_of_locals_that_the_script_keeps_stays() -> None:
    steps, size = Steps(), 4
    mine = locals()
    for _ in steps:
        assert mine["size"] == size


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="f_locals writes through")
def test_what_cannot_be_followed_fails_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("no frames here")

    monkeypatch.setattr("regrow.train.values.spaces.namespaces", broken)
    steps, seen = Steps(), 0
    for _ in steps:
        seen += 1
    assert seen == 3 and steps.encoded == {}
    assert "not followed: RuntimeError: no frames here" in steps.variables.notes[0]


def test_values_of_a_ranks_own_are_left_as_a_step_began_and_taken_over_by_who_takes_the_rank() -> None:
    steps, running, text = Steps(4), 0.0, "short"
    found: dict[bool, Any] = {}
    for number in steps:
        running, text = running + 0.5, "x" * number
        if number == 2:
            places = [place for place in steps.variables.encoded_values() if place.endswith(("\nrunning", "\ntext"))]
            found[False] = read(OwnValues(StepNo(3), left(steps.variables, places, as_begun=False)))
    found[True] = read(OwnValues(StepNo(4), left(steps.variables, places, as_begun=True)))
    assert found[True] != found[False] and names(found[True]) == names(found[False]) == {"running", "text"}
    other = Steps(3)
    other.variables.mine = found[False]
    other.at[1] = lambda: other.variables.receive({place: found[True][place] for place in places})
    running, text = 7.0, "seven"
    for number in other:
        if number == 1:
            assert (running, text) == (1.5, "xx")
    assert other.variables.kept == sorted(places)
    assert read(OwnValues(StepNo(3), b"\xff")) == {} == read(None)
