"""A second training is seen before the first begins, and what is one training is taken for nothing else."""

import ast
import contextlib
import linecache
import signal
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from regrow.train.script import second_loops
from regrow.train.script.callers import script_frames
from regrow.train.script.second_loops import second_loop
from regrow.train.script.source import tree_of


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


class Other:
    """Has a method with the name of a session's."""

    def steps(self) -> None:
        sys.exit(1)


session = Session()


@pytest.fixture(autouse=True)
def the_script_is_this_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests that are loaded beside it are none of its modules."""
    monkeypatch.setattr(second_loops, "sys", types.SimpleNamespace(modules={__name__: sys.modules[__name__]}))


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


def by_a_search_of_a_lambda() -> None:
    search(
        "def optimize(objective, n_trials, timeout, callbacks):\n    objective(1)\n    objective(n_trials)",
        lambda trial: train(trial),
        2,
        None,
        None,
    )


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
        (by_a_search_of_a_lambda, "is called by optuna"),
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


def by_while_for_one_of_several() -> None:
    def script() -> None:
        fold, chosen = 0, 1
        while fold < 3:
            if fold == chosen:
                train(fold)
            fold += 1

    script()


def the_chosen(fold: int) -> int:
    if fold != 1:
        return 0
    return train(fold)


def by_while_that_leaves_the_others_out() -> None:
    def script() -> None:
        fold = 0
        while fold < 3:
            the_chosen(fold)
            fold += 1

    script()


def by_map_that_leaves_the_others_out() -> None:
    def script() -> None:
        assert list(map(the_chosen, range(3))) == [0, 1, 0]

    script()


def stop_if(wanted: bool) -> None:
    if wanted:
        sys.exit(0)


def look_whether_to_stop() -> None:
    stop_if(bool(session.found))


def raise_exit() -> None:
    if session.found:
        raise SystemExit


def ended_by_a_function_between() -> None:
    def script() -> None:
        train()
        look_whether_to_stop()
        train()

    with pytest.raises(SystemExit):
        script()


def ended_by_a_function_that_raises_it() -> None:
    def script() -> None:
        train()
        raise_exit()
        train()

    with pytest.raises(SystemExit):
        script()


def ended_by_a_function_in_the_body() -> None:
    def script() -> None:
        for _ in session.steps():
            look_whether_to_stop()
        train()

    with pytest.raises(SystemExit):
        script()


def ended_by_a_function_in_a_while() -> None:
    def script() -> None:
        while True:
            look_whether_to_stop()
            train()

    with pytest.raises(SystemExit):
        script()


class Converged(Exception):
    """Thrown by what a script calls."""


def raise_converged() -> None:
    if session.found:
        raise Converged


def left_by_an_error_in_a_while() -> None:
    def script() -> None:
        try:
            while True:
                train()
                raise_converged()
        except Converged:
            pass

    script()


def left_by_an_error_that_a_caller_passes_over() -> None:
    def twice() -> None:
        train()
        raise_converged()
        train()

    def script() -> None:
        with contextlib.suppress(Converged):
            twice()

    script()


def left_by_an_error_that_is_caught() -> None:
    def check() -> None:
        raise Converged

    def script() -> None:
        try:
            for _ in session.steps():
                check()
            train()
        except Converged:
            session.found.append("")

    script()
    assert session.found.pop() == ""


def left_by_an_error_that_a_manager_takes() -> None:
    @contextlib.contextmanager
    def until_converged() -> Iterator[None]:
        with contextlib.suppress(Converged):
            yield

    def check() -> None:
        raise Converged

    def script() -> None:
        with until_converged():
            for _ in session.steps():
                check()
            train()

    script()


def ended_by_a_signal() -> None:
    def end() -> None:
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        raise KeyboardInterrupt

    def script() -> None:
        train()
        end()
        train()

    with pytest.raises(KeyboardInterrupt):
        script()


def search(text: str, *given: object) -> None:
    optuna: Any = types.ModuleType("optuna.study")
    exec(text, optuna.__dict__)
    optuna.optimize.__code__ = optuna.optimize.__code__.replace(co_filename=f"{sys.prefix}/site-packages/optuna.py")

    def script() -> None:
        optuna.optimize(*given)

    script()


def by_a_search_that_time_ends() -> None:
    search("def optimize(objective, n_trials, timeout):\n    objective(1)", train, 9, 60.0)


def by_a_search_that_is_stopped() -> None:
    study = types.SimpleNamespace(stop=list)

    def objective(_: object) -> None:
        train()
        study.stop()

    search("def optimize(objective, n_trials):\n    objective(1)", objective, 9)


def by_a_search_that_trains_one() -> None:
    search("def optimize(objective, n_trials):\n    for at in range(n_trials):\n        objective(at)", the_chosen, 3)


def in_blocks_that_are_nested_too_deeply() -> None:
    choices = "".join(f"    elif at == {each}:\n        pass\n" for each in range(400))
    text = f"def script(at, train):\n    if at == -1:\n        pass\n{choices}    else:\n        train()\n"
    name = "/chosen/deep.py"
    linecache.cache[name] = len(text), None, text.splitlines(keepends=True), name
    there: dict[str, Any] = {}
    exec(compile(text, name, "exec"), there)
    deep(lambda: there["script"](401, train))


def deep(call: Callable[[], None], by: int = 300) -> None:
    """Call on a stack that is used already."""
    call() if by == 0 else deep(call, by - 1)


@pytest.mark.parametrize(
    "script",
    [
        once,
        by_while_for_one_of_several,
        by_while_that_leaves_the_others_out,
        by_map_that_leaves_the_others_out,
        ended_by_a_function_between,
        ended_by_a_function_in_the_body,
        ended_by_a_function_in_a_while,
        ended_by_a_function_that_raises_it,
        left_by_an_error_in_a_while,
        left_by_an_error_that_a_caller_passes_over,
        left_by_an_error_that_is_caught,
        left_by_an_error_that_a_manager_takes,
        ended_by_a_signal,
        by_a_search_that_time_ends,
        by_a_search_that_is_stopped,
        by_a_search_that_trains_one,
        in_blocks_that_are_nested_too_deeply,
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


def test_a_text_is_parsed_once_however_many_functions_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    many = 40
    calls = [[(at * 3 + more) % many for more in (1, 2, 3)] for at in range(many)]
    text = "".join(f"def f{at}(): {'; '.join(f'f{each}()' for each in calls[at])}\n" for at in range(many))
    text += "def script(train):\n    train()\n    f0()\n"
    name = "/chosen/many.py"
    linecache.cache[name] = len(text), None, text.splitlines(keepends=True), name
    there: dict[str, Any] = {}
    exec(compile(text, name, "exec"), there)
    parsed: list[str] = []

    def parse(text: str) -> ast.Module | None:
        parsed.append(text)
        return tree_of(text)

    monkeypatch.setattr(second_loops, "tree_of", parse)
    session.found.clear()
    with pytest.raises(RecursionError):
        there["script"](train)
    assert session.found == [""]
    assert parsed.count(text) == 1


def test_nothing_is_certain_of_a_script_that_is_too_long_to_look_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(second_loops, "_MOST_TEXT", 1000)
    session.found.clear()
    by_the_same_function()
    assert session.found == ["", ""]
