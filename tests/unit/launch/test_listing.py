"""Counts in what people read have the word that fits."""

import pytest
from tests.unit.observe.observe_records import FakeJob

from regrow.core.ids import Generation, StepNo
from regrow.launch.listing import status_lines
from regrow.membership.view import JobView
from regrow.observe.goodput_report import report, report_lines


@pytest.mark.parametrize(("number", "said"), [(1, "1 incident, 1 restart"), (2, "2 incidents, 2 restarts")])
def test_incidents_and_restarts_are_counted_in_words_that_fit(number: int, said: str) -> None:
    view = JobView("j", "training", Generation(1), StepNo(1), number, number, [], [], [])
    assert status_lines(view)[0].endswith(said)


def test_one_step_of_a_run_is_a_step() -> None:
    records = FakeJob(step=0.5).run(1, kills={})
    assert report_lines(report(records), records)[0].endswith(", 1 step")
