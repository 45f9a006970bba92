"""Prediction of collectives behind the bodies of a script's steps, by its text."""

import linecache
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from regrow.train.script.expected_calls import leads_to_collectives, may_call_collectives
from regrow.train.script.source import text_of


class Steps:
    """Says for each of its steps what the answer is where it is asked for."""

    def __init__(self) -> None:
        self.answers: list[bool] = []

    def __iter__(self) -> Iterator[Any]:
        for _ in range(2):
            self.answers.append(may_call_collectives(sys._getframe(1)))
            yield self

    def __enter__(self) -> None: ...

    def __exit__(self, *exception: object) -> None: ...


def answer(loop: Callable[[Steps], None], monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr("regrow.train.script.expected_calls._files", lambda: [__file__])
    steps = Steps()
    loop(steps)
    assert len(set(steps.answers)) == 1
    return steps.answers[0]


class FakeDist:
    def all_reduce(self) -> None: ...

    def barrier(self) -> None: ...


dist = FakeDist()


class Evaluation:
    def run(self) -> None:
        self.gather_all()

    def gather_all(self) -> None:
        dist.all_reduce()


def saved() -> str:
    return "nothing of the kind"


def reduce_by_hand() -> None:
    dist.all_reduce()


named_later = Evaluation().run


def guarded(steps: Steps) -> None:
    for step in steps:
        with step:
            pass
        if step is None:
            named_later()


def direct(steps: Steps) -> None:
    for step in steps:
        with step:
            pass
        if step is None:
            dist.barrier()


def in_the_body_alone(steps: Steps) -> None:
    for step in steps:
        with step:
            reduce_by_hand()
        if step is None:
            saved()


def none(steps: Steps) -> None:
    for step in steps:
        with step:
            pass
        saved()


@pytest.mark.parametrize(
    ("loop", "expected"), [(guarded, True), (direct, True), (in_the_body_alone, False), (none, False)]
)
def test_names_are_followed_to_collectives(
    loop: Callable[[Steps], None], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert answer(loop, monkeypatch) is expected


def test_a_loop_whose_text_cannot_be_read_says_nothing() -> None:
    steps = Steps()
    exec("for step in steps:\n    with step:\n        pass\n    dist.barrier()", {"steps": steps, "dist": dist})
    assert steps.answers == [False, False]


def test_imports_under_another_name_are_followed(tmp_path: Path) -> None:
    file = tmp_path / "script.py"
    file.write_text("from torch.distributed import all_gather as ag\nfrom mine import score as evaluate\n")
    other = tmp_path / "mine.py"
    other.write_text("def score():\n    return ag(1)\n")
    broken = tmp_path / "broken.py"
    broken.write_text("def (:\n")
    texts = [text_of(str(each)) for each in (file, broken, other)]
    assert leads_to_collectives({"evaluate"}, texts)
    assert not leads_to_collectives({"other"}, texts)


def test_the_text_is_that_of_what_runs_though_the_file_is_edited(tmp_path: Path) -> None:
    file = tmp_path / "edited.py"
    file.write_text("def score():\n    return barrier()\n")
    assert leads_to_collectives({"score"}, [text_of(str(file))])
    file.write_text("def score():\n    return 1\n")
    linecache.checkcache()
    assert leads_to_collectives({"score"}, [text_of(str(file))])


def test_an_expression_nested_deeper_than_calls_may_be_ends_no_training(tmp_path: Path) -> None:
    file = tmp_path / "long.py"
    file.write_text("def score():\n    return barrier() + " + " + ".join(["x"] * 900) + "\n")
    assert leads_to_collectives({"score"}, [text_of(str(file))])
    file = tmp_path / "longer.py"
    file.write_text("def other():\n    return barrier() + " + " + ".join(["x"] * 90_000) + "\n")
    leads_to_collectives({"other"}, [text_of(str(file))])
