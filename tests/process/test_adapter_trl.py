"""TRL's trainers, killed: state, log history and evaluations are those of the run that nobody disturbed."""

from collections.abc import Iterator

import pytest
from tests.process.launching import TRAINERS, Site, site
from tests.process.training import Fault, Outcome, assert_equal, train

WORLD, STEPS = 2, 6
KINDS = [
    pytest.param(("--kind", "sft"), id="sft"),
    pytest.param(("--kind", "sft", "--lora"), id="sft-lora"),
    pytest.param(("--kind", "dpo"), id="dpo"),
    pytest.param(("--kind", "dpo", "--lora"), id="dpo-lora"),
]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("trl"), *TRAINERS) as made:
        yield made
        made.assert_nothing_left()


def run(here: Site, name: str, kind: tuple[str, ...], faults: list[Fault], *flags: str) -> Outcome:
    outcome = train(here, name, *flags, world=WORLD, steps=STEPS, faults=faults, extra=kind, script="train_trl.py")
    assert outcome.code == 0, outcome.output
    assert len(outcome.finals) == WORLD
    assert len(outcome.losses) == WORLD * STEPS
    return outcome


@pytest.mark.parametrize("kind", KINDS)
def test_both_ranks_killed_before_and_after_an_evaluation(here: Site, kind: tuple[str, ...]) -> None:
    name = "".join(kind)
    undisturbed = run(here, f"undisturbed{name}", kind, [])
    lines = undisturbed.finals[0]["history"]
    assert isinstance(lines, list)
    assert [line["step"] for line in lines if "mean_token_accuracy" in line] == [2, 4, 6]
    assert [line["step"] for line in lines if "eval_mean_token_accuracy" in line] == [4, 6]
    assert len({str(final["digest"]) for final in undisturbed.finals.values()}) == 1
    faults = [Fault(0, 2, "backward"), Fault(1, 5, "reduce")]
    assert_equal(run(here, f"killed{name}", kind, faults), undisturbed, faults=len(faults))


@pytest.mark.parametrize("kind", ["sft", "dpo"])
@pytest.mark.parametrize("warmth", ["imports", "built"])
def test_standbys_take_the_places_of_rank_0_and_of_the_other(here: Site, warmth: str, kind: str) -> None:
    """These trainers ask for their rank early: a built standby takes the rank it was built for, others wait."""
    trainer = ("--kind", kind)
    undisturbed = run(here, f"alone-{kind}-{warmth}", trainer, [])
    faults = [Fault(0, 2, "backward"), Fault(1, 5, "reduce")]
    flags = ("--standby", "1", "--warmth", warmth)
    killed = run(here, f"standby-{kind}-{warmth}", trainer, faults, *flags)
    assert_equal(killed, undisturbed, faults=len(faults))
    assert "standby" in {incident.rung for incident in killed.ledger.incidents}
