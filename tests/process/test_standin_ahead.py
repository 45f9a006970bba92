"""The host of a job runs ahead of its accelerator, and who dies there costs nothing: the losses are the processor's."""

import json

import pytest
from tests.process.launching import Site
from tests.process.training import Fault, Outcome, assert_equal, train

WORLD, STEPS = 2, 16
LATE = {"REGROW_TEST_DEVICE": "standin", "STANDIN_LAG_US": "50"}
pytestmark = pytest.mark.timeout(1200)  # the first of all builds the device


def _forget_standstills(standin_site: Site) -> None:
    for mark in (*standin_site.folder.glob("stood-*"), *standin_site.folder.glob("committed-*")):
        mark.unlink()


@pytest.mark.parametrize("world", [1, WORLD])
def test_the_host_comes_into_the_next_body_while_the_device_stands_still(
    standin_site: Site, on_the_processor: Outcome, world: int
) -> None:
    """From the end of an update on: the CPU transport, which serves its collectives, waits for what it is given."""
    ahead = standin_site.folder / "ahead"
    ahead.unlink(missing_ok=True)
    _forget_standstills(standin_site)
    extra = ("--stand-still", f"{world - 1}:6", "--go-on")
    outcome = train(standin_site, f"ahead-{world}", world=world, steps=STEPS, extra=extra, env=LATE)
    assert outcome.code == 0, outcome.output
    assert ahead.read_text() == "0 waits"
    if world == WORLD:
        assert outcome.finals == on_the_processor.finals
        assert outcome.losses == on_the_processor.losses


@pytest.mark.parametrize("stages", [("begin", "forward", "backward"), ("commit", "after", "data")], ids=" ".join)
def test_who_is_killed_while_its_device_stands_still_before_the_end_of_an_update_costs_no_step_and_no_number(
    standin_site: Site, on_the_processor: Outcome, stages: tuple[str, ...]
) -> None:
    _forget_standstills(standin_site)
    stands = [(at % WORLD, 4 * at + 4) for at in range(len(stages))]
    same = ("commit", "after")
    faults = [Fault(rank, step + (at not in same), at) for at, (rank, step) in zip(stages, stands, strict=True)]
    extra = ("--stand-still", *(f"{rank}:{step}" for rank, step in stands))
    outcome = train(standin_site, f"still-{stages[0]}", world=WORLD, steps=STEPS, faults=faults, extra=extra, env=LATE)
    assert_equal(outcome, on_the_processor, faults=len(faults))
    adopted = {at for at, commits in outcome.ledger.history.items() for each in commits if each.adopted}
    assert {(step, rank) for rank, step in stands} <= adopted, "it had not said that it had committed the step"


WARM = 4
"""Steps in which a worker looks at what its updates have made, and the stand-in learns the sizes of results."""


def test_a_step_of_ddp_waits_for_its_device_once(standin_site: Site) -> None:
    """At the gate, behind the sums of gradients on the device; no sample of the state, taken at some steps, waits."""
    steps, env = 40, LATE | {"STANDIN_GROUPS": "1", "STANDIN_LAG_US": "20"}
    outcome = train(standin_site, "waits", world=WORLD, steps=steps, extra=("--count-waits",), env=env)
    assert outcome.code == 0, outcome.output
    for rank in range(WORLD):
        found = json.loads((standin_site.folder / f"device-waits.{rank}.json").read_text())
        assert len(found) == steps - 1
        assert {step: count for step, count in found.items() if int(step) >= WARM and count > 1} == {}


@pytest.mark.full
@pytest.mark.parametrize("how", ["1:5:once", "0:7:backward"])
def test_a_nan_on_a_device_that_runs_late_is_found_before_the_update(
    standin_site: Site, on_the_processor: Outcome, how: str
) -> None:
    (standin_site.folder / "struck").unlink(missing_ok=True)
    name = f"nan-{how.replace(':', '-')}"
    env = LATE | {"STANDIN_GROUPS": "1"}
    outcome = train(standin_site, name, "--check-for-nan", world=WORLD, steps=STEPS, extra=("--nan", how), env=env)
    assert_equal(outcome, on_the_processor, faults=0)
    assert (standin_site.folder / "struck").exists(), "no number was spoilt"
    rank = int(how[0])
    assert [(each.ranks, each.rung, each.steps_lost) for each in outcome.ledger.incidents] == [([rank], "retry", 0)]
