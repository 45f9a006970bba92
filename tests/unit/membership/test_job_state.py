"""The states of a job, and what may follow what."""

from typing import get_args

import pytest

from regrow.core.ids import StepNo
from regrow.membership.job_state import NEXT, JobState
from regrow.membership.states import RUNNING, Building, Ended, Forming, Gathering, Mending, State, Training


def test_a_job_goes_from_its_nodes_to_its_end() -> None:
    job = JobState()
    assert repr(job.state) == repr(Gathering())
    for new in (
        Building(),
        Forming(1.0, StepNo(0)),
        Training(),
        Mending(1.0),
        Forming(1.0, StepNo(3)),
        Training(),
        Ended(0),
    ):
        job.goto(new)
        assert repr(job.state) == repr(new)
    assert job.take_unforeseen() == []


def test_what_the_table_does_not_have_is_made_and_told_once() -> None:
    job = JobState()
    job.goto(Mending(1.0))
    assert isinstance(job.state, Mending)
    assert job.take_unforeseen() == ["Gathering → Mending"]
    assert job.take_unforeseen() == []


@pytest.mark.parametrize("state", get_args(State), ids=lambda state: state.__name__)
def test_every_state_is_in_the_table_and_can_be_reached_and_left(state: type[State]) -> None:
    assert state is Gathering or any(state in following for before, following in NEXT.items() if before is not state)
    assert (Ended in NEXT[state]) is (state is not Ended)


@pytest.mark.parametrize("state", get_args(RUNNING), ids=lambda state: state.__name__)
def test_a_fault_is_mended_from_every_state_that_has_steps(state: type[State]) -> None:
    assert Mending in NEXT[state]
