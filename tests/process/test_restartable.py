"""Functions marked restartable are run again in the same process, and what they compute is what it would have been."""

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest
from tests.process.launching import Site, site
from tests.process.training import SCRIPTS, Fault, Outcome, assert_equal, train

WORLD, STEPS = 3, 24


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("again")) as made:
        yield made
        made.assert_nothing_left()


SCRIPT = "train_restartable.py"


def run(
    here: Site, name: str, mode: str, *flags: str, faults: list[Fault] | None = None, script: str = SCRIPT
) -> Outcome:
    extra = ("--mode", mode)
    return train(here, name, *flags, world=WORLD, steps=STEPS, faults=faults, extra=extra, script=script)


@pytest.fixture(scope="module")
def undisturbed(here: Site) -> dict[str, Outcome]:
    outcomes = {mode: run(here, f"undisturbed-{mode}", mode) for mode in ("between", "training")}
    for outcome in outcomes.values():
        assert outcome.code == 0, outcome.output
        assert len({str(final["digest"]) for final in outcome.finals.values()}) == 1
    return outcomes


@pytest.mark.parametrize("standbys", ["0", "1"])
def test_an_evaluation_between_steps_goes_through_the_death_of_any_rank(
    here: Site, undisturbed: dict[str, Outcome], standbys: str
) -> None:
    faults = [Fault(rank, 3 + 6 * at, "between") for at, rank in enumerate((1, 0, 2))]
    outcome = run(here, f"between-{standbys}", "between", "--standby", standbys, faults=faults)
    assert_equal(outcome, undisturbed["between"], faults=len(faults))


def test_evaluations_and_steps_take_turns_at_dying(here: Site, undisturbed: dict[str, Outcome]) -> None:
    faults = [
        Fault(1, 3, "between"),
        Fault(1, 4, "reduce"),
        Fault(2, 5, "commit"),
        Fault(0, 9, "between"),
        Fault(2, 9, "form"),
        Fault(0, 12, "between", "exception"),
        Fault(1, 15, "forward"),
    ]
    outcome = run(here, "turns", "between", faults=faults)
    assert_equal(outcome, undisturbed["between"], faults=len(faults))


def test_a_training_with_a_loop_of_its_own_is_called_again(here: Site, undisturbed: dict[str, Outcome]) -> None:
    stages = ("forward", "backward", "reduce", "update", "commit")
    faults = [Fault(at % WORLD, 2 + 4 * at, stage) for at, stage in enumerate(stages)]
    outcome = run(here, "training", "training", faults=faults)
    assert_equal(outcome, undisturbed["training"], faults=len(faults))


def test_an_unwrapped_collective_between_steps_is_made_again(here: Site, undisturbed: dict[str, Outcome]) -> None:
    outcome = run(here, "unwrapped", "unwrapped")
    assert outcome.code == 0, outcome.output
    assert {rank: final["digest"] for rank, final in outcome.finals.items()} == {
        rank: final["digest"] for rank, final in undisturbed["between"].finals.items()
    }
    assert {str(final["last"]) for final in outcome.finals.values()} == {
        str(final["last"]) for final in undisturbed["between"].finals.values()
    }


def test_a_fault_in_the_first_one_that_a_guard_has_kept_from_the_rehearsal(
    here: Site, undisturbed: dict[str, Outcome]
) -> None:
    outcome = run(here, "guarded", "unseen")
    assert outcome.code == 0, outcome.output
    assert {str(final["digest"]) for final in outcome.finals.values()} == {
        str(final["digest"]) for final in undisturbed["between"].finals.values()
    }
    assert {str(final["last"]) for final in outcome.finals.values()} == {
        str(final["last"]) for final in undisturbed["between"].finals.values()
    }


def test_an_unwrapped_collective_that_fails_where_none_was_seen_before_is_named(here: Site) -> None:
    text = (SCRIPTS / SCRIPT).read_text().replace("dist.all_reduce(pair)", 'vars(dist)["all_" + "reduce"](pair)')
    unnamed = here.folder / "unnamed.py"
    unnamed.write_text(text)
    outcome = run(here, "hidden", "unseen", script=str(unnamed))
    assert outcome.code == 1
    assert "allreduce was called outside a step" in outcome.output
    assert "@regrow.restartable" in outcome.output


FIT, UPDATES = "train_fit.py", 12


def fit(here: Site, name: str, *extra: str, world: int = 2, faults: list[Fault] | None = None) -> Outcome:
    return train(here, name, world=world, steps=UPDATES, faults=faults, extra=extra, script=FIT)


def test_a_trainings_rehearsal_leaves_no_trace_in_what_it_counts_before_its_update(here: Site) -> None:
    alone = here.folder / "alone.out"
    words = [sys.executable, str(SCRIPTS / FIT), "--steps", str(UPDATES), "--out", str(alone)]
    subprocess.run(words, env=here.environment(), check=True, timeout=here.patience)
    outcome = fit(here, "counts", world=1)
    assert outcome.code == 0, outcome.output
    assert sorted(outcome.ledger.commits) == list(range(UPDATES))
    assert (outcome.finals[0]["step"], outcome.finals[0]["passes"]) == (UPDATES, UPDATES)
    assert outcome.finals[0] == json.loads(alone.with_suffix(".0.json").read_text())


@pytest.mark.parametrize(
    ("stepped", "told", "done"),
    [
        ("foreign", "(SGD) steps in the training, but is not protected", 0),
        # The rehearsal ends at the protected optimizer's update: what steps after it is met in the first real steps.
        ("both", "after a fault the ranks would differ (give it and its module to protect() too)", 2),
        ("nothing", "fit() has ended without a step of a protected optimizer", 0),
    ],
    ids=["foreign", "both", "nothing"],
)
def test_a_training_whose_optimizer_nobody_protects_is_refused_and_not_run_twice(
    here: Site, stepped: str, told: str, done: int
) -> None:
    name = f"fits-{stepped}"
    outcome = fit(here, name, "--steps-with", stepped)
    assert outcome.code == 1
    assert told in outcome.output
    ends = here.folder / f"{name}.ends"
    ended = ends.read_text().split() if ends.exists() else []
    assert len(ended) == len(set(ended)), "a rank has gone through the whole training twice"
    assert len(outcome.ledger.commits) <= done


def test_a_training_that_draws_before_its_loop_draws_the_same_after_a_fault(here: Site) -> None:
    calm = fit(here, "calm-draws", "--draw-first")
    assert calm.code == 0, calm.output
    faults = [Fault(1, 3, "reduce"), Fault(0, 7, "forward")]
    assert_equal(fit(here, "draws", "--draw-first", faults=faults), calm, faults=len(faults))
