"""Accelerate's loop, killed: losses, state and evaluations are those of the run that nobody disturbed."""

from collections.abc import Iterator

import pytest
from tests.process.launching import TRAINERS, Site, site
from tests.process.training import Fault, Outcome, assert_equal, train

WORLD, STEPS = 3, 12


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("accelerate"), *TRAINERS) as made:
        yield made
        made.assert_nothing_left()


SCRIPT = "train_accelerate.py"


def run(here: Site, name: str, *flags: str, faults: list[Fault], extra: tuple[str, ...] = ()) -> Outcome:
    outcome = train(here, name, *flags, world=WORLD, steps=STEPS, faults=faults, script=SCRIPT, extra=extra)
    assert outcome.code == 0, outcome.output
    assert len(outcome.finals) == WORLD
    assert len(outcome.losses) == WORLD * STEPS
    for rank, final in outcome.finals.items():
        assert final["state"] == [rank, WORLD]
        assert final["main"] == (rank == 0)
    return outcome


@pytest.fixture(scope="module")
def undisturbed(here: Site) -> Outcome:
    outcome = run(here, "undisturbed", faults=[])
    assert len({str(final["digest"]) for final in outcome.finals.values()}) == 1
    assert len({str(final["history"]) for final in outcome.finals.values()}) == 1
    assert len(outcome.finals[0]["history"]) == STEPS // 4  # type: ignore[arg-type]
    return outcome


@pytest.mark.parametrize("flags", [(), ("--standby", "1", "--warmth", "imports")], ids=["fork", "standby"])
def test_rank_0_and_others_die_in_steps_and_in_an_evaluation(
    here: Site, undisturbed: Outcome, flags: tuple[str, ...]
) -> None:
    faults = [Fault(1, 2, "reduce"), Fault(0, 7, "between"), Fault(2, 9, "backward")]
    outcome = run(here, "-".join(["killed", *flags]).replace(" ", ""), *flags, faults=faults)
    assert_equal(outcome, undisturbed, faults=len(faults))


@pytest.mark.full
def test_a_script_that_keeps_its_bodies_as_they_were_goes_through_kills(here: Site) -> None:
    """A step of one batch, and a plain evaluation behind an epoch, by a loader that was prepared with the others."""
    one = ("--one-batch",)
    calm = run(here, "calm-one", faults=[], extra=one)
    assert len(calm.finals[0]["history"]) == 2 * STEPS // 4  # type: ignore[arg-type]
    assert calm.finals[0]["history"][1::2] == [0, 1, 2]  # type: ignore[index]
    assert len({str(final["history"]) for final in calm.finals.values()}) == 1
    faults = [Fault(1, 2, "reduce"), Fault(0, 4, "between"), Fault(2, 9, "backward"), Fault(1, 12, "between")]
    assert_equal(run(here, "killed-one", faults=faults, extra=one), calm, faults=len(faults))
