"""A node that wants to join before the job answers."""

from typing import Any

import pytest

from regrow.core.errors import CoordinatorGone, UsageError
from regrow.launch.late_node import asked_for_a_place
from regrow.launch.remote import refusal_of
from regrow.membership.admission import LOCKED


class _Late:
    """A job that answers from a time on."""

    def __init__(self, answers_at: float, error: Exception | None = None) -> None:
        self.now, self._answers_at = 0.0, answers_at
        self.error = error or CoordinatorGone("nobody answers")

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def ask(self) -> Any:
        if self.now < self._answers_at:
            raise self.error
        return "a place"


def asked(job: _Late, wait: float) -> Any:
    return asked_for_a_place(job.ask, wait, clock=job.clock, sleep=job.sleep)


def test_a_job_that_does_not_answer_yet_is_asked_again() -> None:
    job = _Late(answers_at=7.0)
    assert asked(job, 60.0) == "a place" and 7.0 <= job.now < 8.0


@pytest.mark.parametrize(("wait", "took"), [(0.0, 0.0), (5.0, 5.0)])
def test_it_is_not_asked_for_longer_than_was_said(wait: float, took: float) -> None:
    job = _Late(answers_at=100.0)
    with pytest.raises(CoordinatorGone):
        asked(job, wait)
    assert took <= job.now < took + 1.0


def test_a_place_that_another_node_still_has_is_waited_for() -> None:
    job = _Late(answers_at=7.0, error=refusal_of("here", LOCKED, b'{"error": "this job has at most 2 nodes"}'))
    assert isinstance(job.error, UsageError) and asked(job, 60.0) == "a place"


def test_a_refusal_is_final() -> None:
    def refuse() -> Any:
        raise UsageError("the job takes no more nodes")

    with pytest.raises(UsageError):
        asked_for_a_place(refuse, 60.0, sleep=lambda seconds: pytest.fail("it waited"))
