"""Whole jobs on an accelerator: the stand-in's operators run late, and the losses are the processor's, bit for bit."""

import pytest
from tests.process.launching import Site
from tests.process.training import Fault, Outcome, assert_equal, train

WORLD, STEPS = 2, 16
STAGES = ("forward", "backward", "reduce", "update")
LATE = {"REGROW_TEST_DEVICE": "standin", "STANDIN_LAG_US": "50", "STANDIN_QUEUE": "48"}
"""Each launch takes a while, and a step has more of them than a stream holds."""
pytestmark = pytest.mark.timeout(1200)  # the first of all builds the device


@pytest.mark.parametrize("standbys", [0, 1])
def test_any_rank_of_ddp_killed_at_every_stage_on_a_device_that_runs_late(
    standin_site: Site, on_the_processor: Outcome, standbys: int
) -> None:
    kills = [(stage, rank) for stage in STAGES for rank in range(WORLD)]
    faults = [Fault(rank, 1 + at + at // 2, stage) for at, (stage, rank) in enumerate(kills)]
    flags = ("--standby", str(standbys), "--warmth", "built")
    outcome = train(standin_site, f"late-{standbys}", *flags, world=WORLD, steps=STEPS, faults=faults, env=LATE)
    # An accelerator's numbers are read behind the gate: to read them in mid-step would stall it. A reduction that was
    # issued may be done without who dies then, so the other commits the step.
    unsaid = {(fault.step, fault.rank) for fault in faults if fault.at == "reduce"}
    assert_equal(outcome, on_the_processor, faults=len(faults), unsaid=unsaid)
    if "standby" in {incident.rung for incident in outcome.ledger.incidents}:
        assert "its model takes memory there a second time" in outcome.output


@pytest.mark.parametrize("where", ["body", "after"])
def test_a_device_that_fails_for_good_is_no_error_of_the_script_and_its_rank_goes_on_elsewhere(
    standin_site: Site, on_the_processor: Outcome, where: str
) -> None:
    extra = ("--break-device", f"1:5:{where}")
    outcome = train(standin_site, f"broken-{where}", world=WORLD, steps=STEPS, extra=extra, env=LATE)
    assert outcome.code == 0, outcome.output
    assert outcome.finals == on_the_processor.finals
    assert {at: loss for at, loss in outcome.losses.items() if on_the_processor.losses[at] != loss} == {}
    assert "the STANDIN device of rank 1 has failed (standin error: device-side assert triggered)" in outcome.output
    assert [incident.ranks for incident in outcome.ledger.incidents] == [[1]]


def test_a_script_that_breaks_its_only_device_at_each_attempt_is_named_at_the_third(standin_site: Site) -> None:
    extra = ("--break-device", "1:5:always")
    outcome = train(standin_site, "breaks", world=WORLD, steps=STEPS, extra=extra, env=LATE)
    assert outcome.code == 1, outcome.output
    assert "the device of rank 1 failed 3 times at step 5, and there is no other (node0's slot 1)" in outcome.output
    assert "STANDIN device of rank 1 has failed (standin error: device-side assert triggered)" in outcome.output
