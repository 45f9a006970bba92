"""Whole jobs on an accelerator: the stand-in's operators run late, and the losses are the processor's, bit for bit."""

from collections.abc import Iterator

import pytest
from tests.process.launching import Site, site
from tests.process.training import Fault, Outcome, assert_equal, train
from tests.standin.building import Unbuildable, library

WORLD, STEPS = 2, 16
STAGES = ("forward", "backward", "reduce", "update")
LATE = {"REGROW_TEST_DEVICE": "standin", "STANDIN_LAG_US": "50", "STANDIN_QUEUE": "48"}
"""Each launch takes a while, and a step has more of them than a stream holds."""
pytestmark = pytest.mark.timeout(1200)  # the first of all builds the device


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    try:
        library()
    except Unbuildable as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("standin")) as made:
        yield made
        made.assert_nothing_left()


@pytest.fixture(scope="module")
def undisturbed(here: Site) -> Outcome:
    """On the processor."""
    outcome = train(here, "undisturbed", world=WORLD, steps=STEPS)
    assert outcome.code == 0, outcome.output
    assert len(outcome.losses) == WORLD * STEPS
    return outcome


@pytest.mark.parametrize("standbys", [0, 1])
def test_any_rank_of_ddp_killed_at_every_stage_on_a_device_that_runs_late(
    here: Site, undisturbed: Outcome, standbys: int
) -> None:
    kills = [(stage, rank) for stage in STAGES for rank in range(WORLD)]
    faults = [Fault(rank, 1 + at + at // 2, stage) for at, (stage, rank) in enumerate(kills)]
    flags = ("--standby", str(standbys))
    outcome = train(here, f"late-{standbys}", *flags, world=WORLD, steps=STEPS, faults=faults, env=LATE)
    # An accelerator's numbers are read behind the gate: to read them in mid-step would stall it. A reduction that was
    # issued may be done without who dies then, so the other commits the step.
    unsaid = {(fault.step, fault.rank) for fault in faults if fault.at == "reduce"}
    assert_equal(outcome, undisturbed, faults=len(faults), unsaid=unsaid)


@pytest.mark.parametrize("where", ["body", "after"])
def test_a_device_that_fails_for_good_is_no_error_of_the_script_and_its_rank_goes_on_elsewhere(
    here: Site, undisturbed: Outcome, where: str
) -> None:
    extra = ("--break-device", f"1:5:{where}")
    outcome = train(here, f"broken-{where}", world=WORLD, steps=STEPS, extra=extra, env=LATE)
    assert outcome.code == 0, outcome.output
    assert outcome.finals == undisturbed.finals
    assert {at: loss for at, loss in outcome.losses.items() if undisturbed.losses[at] != loss} == {}
    assert "the STANDIN device of rank 1 has failed (standin error: device-side assert triggered)" in outcome.output
    assert [incident.ranks for incident in outcome.ledger.incidents] == [[1]]


def test_a_script_that_breaks_its_only_device_at_each_attempt_is_named_at_the_third(here: Site) -> None:
    extra = ("--break-device", "1:5:always")
    outcome = train(here, "breaks", world=WORLD, steps=STEPS, extra=extra, env=LATE)
    assert outcome.code == 1, outcome.output
    assert "the device of rank 1 failed 3 times at step 5, and there is no other (node0's slot 1)" in outcome.output
    assert "STANDIN device of rank 1 has failed (standin error: device-side assert triggered)" in outcome.output
