"""Lightning's `Trainer`, killed: state, metrics, checkpoints are those of the run that nobody disturbed."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from tests.process.launching import LIGHTNING, Site, site
from tests.process.training import Fault, Outcome, assert_equal, train

WORLD, STEPS, EPOCH = 3, 10, 5
STAGES = ("data", "forward", "backward", "reduce", "update", "commit")
Heard = dict[str, list[int]]


@dataclass
class Fitted:
    """Result of a run, and the events that each rank's callback has heard."""

    outcome: Outcome
    heard: dict[int, Heard]


def run(
    here: Site,
    name: str,
    *flags: str,
    faults: list[Fault] | None = None,
    extra: tuple[str, ...] = (),
    steps: int = STEPS,
) -> Fitted:
    shutil.rmtree(here.folder / "checkpoints", ignore_errors=True)
    outcome = train(
        here, name, *flags, world=WORLD, steps=steps, faults=faults, extra=extra, script="train_lightning.py"
    )
    heard: dict[int, Heard] = {rank: final.pop("heard") for rank, final in outcome.finals.items()}  # type: ignore[misc]
    return Fitted(outcome, heard)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("lightning"), *LIGHTNING) as made:
        yield made
        made.assert_nothing_left()


@pytest.fixture(scope="module")
def undisturbed(here: Site) -> Outcome:
    fitted = run(here, "undisturbed")
    outcome = fitted.outcome
    assert outcome.code == 0, outcome.output
    assert len(outcome.losses) == WORLD * STEPS
    assert len(outcome.finals) == WORLD
    for shared in ("digest", "history", "best"):
        assert len({str(final[shared]) for final in outcome.finals.values()}) == 1
    assert outcome.finals[0]["files"] == ["epoch=0-step=5.ckpt", "epoch=1-step=10.ckpt"]
    assert [final["place"] for _, final in sorted(outcome.finals.items())] == [
        [rank, WORLD, STEPS, 2] for rank in range(WORLD)
    ]
    assert_heard_once(fitted, lost=set())
    return outcome


def assert_heard_once(fitted: Fitted, *, lost: set[int]) -> None:
    """Each step once, in order, to the last one; `lost`: ranks that were replaced, who hear from where they came in."""
    assert len(fitted.heard) == WORLD
    twice = [step for step in range(STEPS) for _ in range(2)]  # an update has two batches of each rank
    expected = {
        "begin": twice,
        "end": [step + 1 for step in twice],
        "validation": [EPOCH, 2 * EPOCH],
        "epoch": [EPOCH, 2 * EPOCH],
    }
    for rank, heard in fitted.heard.items():
        for event, steps in expected.items():
            mine = heard.get(event, [])
            assert mine == steps[len(steps) - len(mine) :], (rank, event)
            assert rank in lost or len(mine) == len(steps), (rank, event)


def test_ranks_that_die_in_a_step_and_in_a_validation(here: Site, undisturbed: Outcome) -> None:
    """Rank 0, which writes the checkpoints, dies in the validation behind step 5, and another one in a reduction."""
    died = ("--die-in-validation", "0", "5")
    fitted = run(here, "validation", faults=[Fault(1, 3, "reduce")], extra=died)
    assert_equal(fitted.outcome, undisturbed, faults=1)
    found = fitted.outcome.ledger.incidents  # one, where the second comes before it is known that the first is mended
    assert {incident.kind for incident in found} == {"exit"} and sum(incident.faults for incident in found) == 2
    assert_heard_once(fitted, lost={0, 1})


def test_it_learns_what_the_stock_trainer_does(here: Site) -> None:
    """Without faults its losses, validations and checkpoints are those of Lightning's own loop."""
    ours = run(here, "ours", steps=8, extra=("--in-order",)).outcome
    stock = run(here, "stock", steps=8, extra=("--in-order", "--stock")).outcome
    assert (ours.code, stock.code) == (0, 0), ours.output + stock.output
    mine, theirs = ours.finals[0], stock.finals[0]
    assert (mine["files"], mine["place"]) == (theirs["files"], theirs["place"])
    assert len(mine["history"]) == len(theirs["history"]) == 2  # type: ignore[arg-type]
    for line, other in zip(mine["history"], theirs["history"], strict=True):  # type: ignore[call-overload]
        assert line == pytest.approx(other, rel=1e-5)


def test_every_stage_and_every_rank_killed_one_after_another(here: Site, undisturbed: Outcome) -> None:
    faults = [Fault(at % WORLD, 1 + at, stage) for at, stage in enumerate(STAGES)]
    fitted = run(here, "stages", faults=faults)
    assert_equal(fitted.outcome, undisturbed, faults=len(faults))
    assert_heard_once(fitted, lost=set(range(WORLD)))


def test_a_standby_takes_the_place_of_who_dies_in_a_validation(here: Site, undisturbed: Outcome) -> None:
    died = ("--die-in-validation", "0", "5")
    faults = [Fault(2, 7, "forward")]
    fitted = run(here, "standby", "--standby", "1", "--warmth", "imports", faults=faults, extra=died)
    assert_equal(fitted.outcome, undisturbed, faults=len(faults))
    assert "standby" in {incident.rung for incident in fitted.outcome.ledger.incidents}
    assert_heard_once(fitted, lost={0, 2})
