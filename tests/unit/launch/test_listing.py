"""Lines about jobs: counts have the word that fits, and planned changes are no incidents."""

import pytest
from tests.unit.observe.observe_records import FakeJob

from regrow.core.ids import Generation, StepNo
from regrow.launch.listing import status_lines
from regrow.membership.view import JobView
from regrow.observe.goodput_report import report, report_lines
from regrow.observe.story import tally


@pytest.mark.parametrize(("number", "said"), [(1, "1 incident, 1 restart"), (2, "2 incidents, 2 restarts")])
def test_incidents_and_restarts_are_counted_in_words_that_fit(number: int, said: str) -> None:
    view = JobView("j", "training", Generation(1), StepNo(1), number, number, [], [], [])
    assert status_lines(view)[0].endswith(said)


@pytest.mark.parametrize(
    ("incidents", "changes", "said"),
    [(0, 0, "0 incidents"), (0, 1, "0 incidents, 1 planned change"), (1, 2, "1 incident, 2 planned changes")],
)
def test_planned_changes_are_counted_apart(incidents: int, changes: int, said: str) -> None:
    view = JobView("j", "training", Generation(1), StepNo(1), 0, incidents, [], [], [], changes=changes)
    assert status_lines(view)[0].endswith(f"generation 1, {said}, 0 restarts")
    assert tally(incidents, changes) == said, "as in the last line of a job"


def test_one_step_of_a_run_is_a_step() -> None:
    records = FakeJob(step=0.5).run(1, kills={})
    assert report_lines(report(records), records)[0].endswith(", 1 step")
