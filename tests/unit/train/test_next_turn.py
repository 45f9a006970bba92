"""A loop goes on with its next turn, without what stands behind the statement under way."""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tqdm import tqdm

from regrow.core.process.rewriting import skip_to_next
from regrow.train.script.asked_loop import Asking, asking
from regrow.train.script.next_turn import turn_of


class Steps:
    """Steps of which some fail the first time; then the turn is taken again, as a loop of ours does it."""

    def __init__(self, *fail: int, until: int = 4, last: int | None = None) -> None:
        self.failing, self.until, self.last = set(fail), until, last
        self.number = -1
        self.skipped: list[int] = []
        self._asked: Asking | None = None
        self._done = True

    def __iter__(self) -> Iterator["Steps"]:
        while self.number + self._done < self.until:
            self._asked = asking(sys._getframe(1))
            self.number += self._done
            self._done = True
            yield self

    def __enter__(self) -> int:
        return self.number

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        self._done = self.number not in self.failing
        self.failing -= {self.number}
        turn = turn_of(self._asked, sys._getframe(1)) if self._asked and not self._done else None
        if turn is not None:
            self.skipped.append(self.number)
            skip_to_next(turn, self._again)
        return True

    def _again(self) -> bool:
        self._done = True
        return self.number != self.last


def plain(steps: Steps, seen: list[Any]) -> None:
    for step in steps:
        begin = step.number
        with step as number:
            seen.append(number)
        seen.append("behind")
        if number >= 1:
            break
    assert begin == number


def by_the_first_line(steps: Steps, seen: list[Any]) -> None:
    for step in steps:
        with step as number:
            seen.append(number)
            raise ValueError
        seen.append("behind")
        if number >= 1:
            return


def body(step: Steps, seen: list[Any]) -> int:
    with step as number:
        seen.append(number)
    return number


def in_a_function(steps: Steps, seen: list[Any]) -> None:
    for step in steps:
        number = body(step, seen)
        seen.append("behind")
        if number >= 1:
            sys.exit()


def within_another_context(steps: Steps, seen: list[Any]) -> None:
    inside = 0
    for step in steps:
        with contextlib.ExitStack() as stack:
            inside += 1
            stack.callback(lambda: None)
            with step as number:
                seen.append(number)
            inside -= 1
        assert inside == 0
        seen.append("behind")
        try:
            if number >= 1:
                break
        finally:
            inside += 0


def passed_on(steps: Steps, seen: list[Any]) -> None:
    for step in tqdm(steps, disable=True):
        with step as number:
            seen.append(number)
        seen.append("behind")
        if number >= 1:
            break


def made_of(steps: Steps) -> Iterator[tuple[Steps, int]]:
    for step in steps:
        yield step, step.number


LOOPS = [plain, by_the_first_line, in_a_function, within_another_context, passed_on]


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("fail", [(0,), (1,), (0, 1)])
def test_a_loop_is_not_left_behind_what_has_not_happened(loop: Callable[..., None], fail: tuple[int, ...]) -> None:
    seen: list[Any] = []
    steps = Steps(*fail)
    with contextlib.suppress(SystemExit):
        loop(steps, seen)
    expected: list[Any] = []
    for number in (0, 1):
        expected += [number, number, "behind"] if number in fail else [number, "behind"]
    assert seen == expected
    assert steps.skipped == [*fail]
    assert sys.gettrace() is None


def test_where_there_is_no_further_turn_the_loop_goes_on_as_it_is() -> None:
    seen: list[Any] = []
    plain(Steps(1, last=1), seen)
    assert seen == [0, "behind", 1, "behind"]


def test_loops_that_are_not_left_there_or_are_no_for_loops_are_left_alone() -> None:
    steps = Steps(0, 1, 2, until=3)
    for step in steps:
        with step:
            pass
    assert steps.skipped == []
    following = iter(steps := Steps(0, until=3))
    while True:
        with next(following, steps):
            pass
        if steps.number == 2:
            break
    assert steps.skipped == []
    for step, _ in made_of(steps := Steps(0, until=2)):
        with step as number:
            pass
        if number:
            break
    assert steps.skipped == []
    for step in (steps := Steps(0, until=2)):
        for _ in range(1):
            with step as number:
                pass
            if number:
                break
        assert number < 2
    assert steps.skipped == []


def test_who_traces_goes_on_with_it() -> None:
    lines: list[int] = []

    def local(frame: Any, event: str, _: object) -> Any:
        lines.extend([frame.f_lineno] if event == "line" else [])
        return local

    def watch(frame: Any, _: str, __: object) -> Any:
        return local if frame.f_code is plain.__code__ else None

    before = sys.gettrace()
    seen: list[Any] = []
    sys.settrace(watch)
    try:
        plain(Steps(0), seen)
        assert sys.gettrace() is watch
    finally:
        sys.settrace(before)
    assert seen == [0, 0, "behind", 1, "behind"]
    assert lines[-1] == plain.__code__.co_firstlineno + 8


def test_other_threads_and_other_calls_are_not_traced() -> None:
    steps, found = Steps(0), []

    class Looking(Steps):
        def __exit__(self, *error: Any) -> bool:
            absorbed = super().__exit__(*error)
            thread = threading.Thread(target=lambda: found.append(sys.gettrace()))
            thread.start()
            thread.join()
            return absorbed

    plain(steps := Looking(0), [])
    assert steps.skipped == [0]
    assert found[0] is None


def test_an_error_of_the_next_turn_is_one_of_the_loop() -> None:
    class Failing(Steps):
        def _again(self) -> bool:
            raise OSError

    with pytest.raises(OSError):
        plain(Failing(0), [])


def test_the_variables_are_what_they_were_whatever_reads_them_meanwhile() -> None:
    class Reading(Steps):
        def _again(self) -> bool:
            sys._getframe(2).f_locals.clear() if sys.version_info < (3, 13) else None
            return super()._again()

    seen: list[Any] = []
    plain(Reading(0), seen)
    assert seen == [0, 0, "behind", 1, "behind"]
