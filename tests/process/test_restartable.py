"""Functions marked restartable are run again in the same process, and what they compute is what it would have been."""

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
