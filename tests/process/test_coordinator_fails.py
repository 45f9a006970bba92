"""The coordinator raises, where it must not: another goes on from what the agents know, and training hears nothing."""

from collections.abc import Iterator

import pytest
from tests.process.defective import VARIABLE
from tests.process.launching import Site, site
from tests.process.training import Fault, Outcome, assert_equal, train

WORLD, STEPS = 3, 24
SLOW = ("--pause", "0.05")
"""An agent tells of commits a few times a second: else all are made before it has told of enough."""


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("coordinator")) as made:
        yield made
        made.assert_nothing_left()


@pytest.fixture(scope="module")
def undisturbed(here: Site) -> Outcome:
    outcome = train(here, "undisturbed", world=WORLD, steps=STEPS)
    assert outcome.code == 0, outcome.output
    return outcome


CASES = {
    "while all build": ("WorkerReady:1", []),
    "as the first generation is formed": ("late WorkerReady:3", []),
    "as training begins": ("WorkerResumed:2, late WorkerCommitted:2", []),
    "between faults": ("late NodeProgress:1", []),
    "at a death, before anything is done": ("WorkerExited:1", [Fault(1, 8, "backward")]),
    "at a death, as all is ordered": ("late WorkerExited:1", [Fault(1, 8, "backward")]),
    "as a survivor has halted": ("WorkerHalted:1, late WorkerHalted:2", [Fault(0, 8, "reduce")]),
    "as the newcomer is ready": ("WorkerReady:4", [Fault(2, 8, "update")]),
    "as the next generation is formed": ("late WorkerReady:4", [Fault(2, 8, "forward")]),
    "as the last step is done": ("WorkerFinished:2, late WorkerFinished:3", []),
    "as the job ends": ("WorkerExited:2", []),
}


@pytest.mark.parametrize("case", CASES)
def test_training_goes_on_and_ends_the_same(here: Site, undisturbed: Outcome, case: str) -> None:
    defects, faults = CASES[case]
    name = case.replace(",", "").replace(" ", "-")
    here.module = "tests.process.defective"
    try:
        slow = SLOW if "NodeProgress" in defects else ()
        outcome = train(here, name, world=WORLD, steps=STEPS, faults=faults, env={VARIABLE: defects}, extra=slow)
    finally:
        here.module = "regrow"
    assert_equal(outcome, undisturbed, faults=len(faults))
    times = defects.count(":")
    assert outcome.output.count("its coordinator failed") == times, outcome.output
    assert outcome.output.count("the coordinator works again") == times, outcome.output
    if not faults and "WorkerReady" not in defects and "Resumed" not in defects:
        assert len(outcome.ledger.generations) == 1, "no rank has heard of it"


def test_one_that_fails_too_often_ends_the_job_and_says_so(here: Site) -> None:
    here.module = "tests.process.defective"
    defects = ", ".join(f"NodeProgress:{number}" for number in range(2, 6))
    try:
        outcome = train(here, "too-often", world=WORLD, steps=2000, env={VARIABLE: defects}, extra=SLOW)
    finally:
        here.module = "regrow"
    assert outcome.code == 70
    assert "regrow's coordinator failed in handling NodeProgress: KeyError: 'NodeProgress:5'" in outcome.output
    assert "please report this" in outcome.output
