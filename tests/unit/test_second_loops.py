"""A second training is seen before the first begins, and what is one training is taken for nothing else."""

import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from regrow.train.rehearsal.callers import script_frames
from regrow.train.rehearsal.second_loops import second_loop


class Session:
    """Begins trainings."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def steps(self) -> Iterator[int]:
        """Says what is seen as it is called."""
        frames = script_frames(sys._getframe(1))
        last = next(at for at, frame in enumerate(frames) if frame.f_code.co_name == "script")
        self.found.append(second_loop(frames[: last + 1], self))
        return iter([1])


session = Session()


def train(_: object = None) -> int:
    for step in session.steps():
        assert step
    return 1


def other() -> None:
    list(session.steps())


def by_for() -> None:
    def script() -> None:
        for fold in range(2):
            train(fold)

    script()


def by_map() -> None:
    def script() -> None:
        assert sum(map(train, range(2))) == 2

    script()


def by_while() -> None:
    def script() -> None:
        fold = 0
        while fold < 2:
            train(fold)
            fold += 1

    script()


def by_comprehension() -> None:
    def script() -> None:
        assert [train(fold) for fold in range(2)] == [1, 1]

    script()


def one_after_the_other() -> None:
    def script() -> None:
        for _ in session.steps():
            pass
        with open(__file__):
            for _ in session.steps():
                pass

    script()


def by_two_functions() -> None:
    def script() -> None:
        train()
        assert session.found
        other()

    script()


def by_the_same_function() -> None:
    def script() -> None:
        first = train(1)
        assert train(2) == first

    script()


def by_a_search() -> None:
    optuna: Any = types.ModuleType("optuna.study")
    exec("def optimize(objective, n_trials):\n    objective(1)\n    objective(n_trials)", optuna.__dict__)

    def script() -> None:
        optuna.optimize(train, 2)

    optuna.optimize.__code__ = optuna.optimize.__code__.replace(co_filename=f"{sys.prefix}/site-packages/optuna.py")
    script()


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (by_for, "within another loop"),
        (by_map, "is called by map"),
        (by_while, "within another loop"),
        (by_comprehension, "within another loop"),
        (one_after_the_other, "is followed by another training"),
        (by_two_functions, "is followed by another training"),
        (by_the_same_function, "is followed by another training"),
        (by_a_search, "is called by optuna"),
    ],
)
def test_a_second_training_is_seen_as_the_first_begins(script: Callable[[], None], words: str) -> None:
    session.found.clear()
    script()
    assert words in session.found[0] and len(session.found) == 2


def once() -> None:
    def script() -> None:
        train()
        assert session.found

    script()


def one_of_two() -> None:
    def script() -> None:
        if session.found:
            other()
        else:
            train()

    script()


def left_before_the_other() -> None:
    def script() -> None:
        if not session.found:
            train()
            return
        other()

    script()


def again_if_it_fails() -> None:
    def script() -> None:
        while True:
            try:
                train()
            except ValueError:
                continue
            else:
                break

    script()


def another_perhaps() -> None:
    def script() -> None:
        train()
        if len(session.found) > 1:
            other()
        for _ in ():
            other()

    script()


def of_another_thing_with_steps() -> None:
    class Schedule:
        def steps(self) -> list[int]:
            return []

    def script() -> None:
        schedule = Schedule()
        train()
        schedule.steps()

    script()


def left_if_there_is_no_more() -> None:
    def script() -> None:
        train()
        if len(sys.argv) > -1:
            return
        train()

    script()


def ended_if_there_is_no_more() -> None:
    def script() -> None:
        train()
        if len(sys.argv) > -1:
            sys.exit(0)
        train()

    with pytest.raises(SystemExit):
        script()


def ended_by_the_first() -> None:
    def first() -> None:
        train()
        if session.found:
            raise SystemExit(0)

    def script() -> None:
        first()
        train()

    with pytest.raises(SystemExit):
        script()


def left_in_the_first_loop() -> None:
    def script() -> None:
        for _ in session.steps():
            if session.found:
                return
        train()

    script()


def tuned(finetune: bool) -> None:
    if not finetune:
        return
    train()


def left_by_the_callee() -> None:
    def script() -> None:
        train()
        tuned(False)

    script()


def of_another_case() -> None:
    def script() -> None:
        match session.found:
            case []:
                train()
            case _:
                other()
        match session.found:
            case []:
                train()

    script()


def trained_later() -> Iterator[int]:
    yield train()


def by_a_generator_that_nobody_takes() -> None:
    def script() -> None:
        train()
        trained_later()

    script()


def by_while_with_a_counter_inside() -> None:
    def script() -> None:
        it, most = 0, 3
        while it < most:
            train()
            for _ in range(3):
                it += 1

    script()


def by_while_once() -> None:
    def script() -> None:
        it = 0
        while it < 1:
            train()
            it += 1

    script()


def by_map_of_one() -> None:
    def script() -> None:
        assert list(map(train, [1])) == [1]

    script()


def by_next_of_map() -> None:
    def script() -> None:
        assert next(map(train, [1, 2])) == 1

    script()


def by_a_search_with_one_trial() -> None:
    optuna: Any = types.ModuleType("optuna.study")
    exec("def optimize(objective, n_trials):\n    objective(1)", optuna.__dict__)

    def script() -> None:
        optuna.optimize(train, n_trials=1)

    optuna.optimize.__code__ = optuna.optimize.__code__.replace(co_filename=f"{sys.prefix}/site-packages/optuna.py")
    script()


@pytest.mark.parametrize(
    "script",
    [
        once,
        one_of_two,
        left_before_the_other,
        again_if_it_fails,
        another_perhaps,
        of_another_thing_with_steps,
        left_if_there_is_no_more,
        ended_if_there_is_no_more,
        ended_by_the_first,
        left_in_the_first_loop,
        left_by_the_callee,
        of_another_case,
        by_a_generator_that_nobody_takes,
        by_while_with_a_counter_inside,
        by_while_once,
        by_map_of_one,
        by_next_of_map,
        by_a_search_with_one_trial,
    ],
)
def test_a_single_training_is_none(script: Callable[[], None]) -> None:
    session.found.clear()
    script()
    assert session.found == [""]
