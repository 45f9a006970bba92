"""Results that cannot be asked for twice (`step.external`): real kills, the same bits, and no question twice."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.process.launching import Site, site
from tests.process.training import SCRIPTS, Outcome, assert_equal, train

WORLD, STEPS = 2, 6


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("external")) as made:
        yield made
        made.assert_nothing_left()


def run(here: Site, name: str, *flags: str, extra: tuple[str, ...] = (), nodes: int = 1) -> Outcome:
    return train(here, name, *flags, world=WORLD, steps=STEPS, extra=extra, script="train_external.py", nodes=nodes)


def asked(folder: Path, name: str) -> dict[int, list[str]]:
    """Questions to the simulator by each rank, in order."""
    return {rank: (folder / f"{name}.asked-{rank}").read_text().splitlines() for rank in range(WORLD)}


@pytest.fixture(scope="module")
def undisturbed(here: Site) -> Outcome:
    outcome = run(here, "undisturbed")
    assert outcome.code == 0, outcome.output
    assert all(len(questions) == 2 * STEPS for questions in asked(here.folder, "undisturbed").values())
    return outcome


@pytest.mark.parametrize(
    "flags",
    [pytest.param((), id="fork"), pytest.param(("--standby", "1"), id="standby", marks=pytest.mark.full)],
)
def test_survivors_and_newcomers_are_given_what_was_drawn_once(
    here: Site, undisturbed: Outcome, flags: tuple[str, ...]
) -> None:
    name = f"killed-{len(flags)}"
    places = ("1@set-up", "1@drawn 1", "0@between 2", "1@before 3", "0@drawn 5")
    outcome = run(here, name, *flags, extra=("--die", *places))
    for place in places:
        assert (here.folder / f"{name}.died-{place.replace(' ', '-')}").exists(), f"{place}: {outcome.output}"
    assert_equal(outcome, undisturbed, faults=0)
    assert asked(here.folder, name) == asked(here.folder, "undisturbed")


def test_results_beyond_the_bound_of_copies_are_drawn_again_which_the_job_says(here: Site) -> None:
    outcome = run(here, "large", extra=("--large", "--die", "1@drawn 2"))
    assert "what a rank draws by step.external in a step has more than 34 MB: the rest is not copied" in outcome.output
    assert "rank 1 has drawn again by step.external in step 2, after a fault: there is no copy of it" in outcome.output
    assert outcome.code == 76, outcome.output
    assert len(asked(here.folder, "large")[1]) == 2 * STEPS + 1


@pytest.mark.full
def test_a_rank_of_a_lost_node_draws_again_which_the_job_says(here: Site) -> None:
    outcome = run(here, "nodes", extra=("--node", "--die", "1@drawn 2"), nodes=2)
    assert "rank 1 has drawn again by step.external in step 2, after a fault: what was drawn in it" in outcome.output
    assert outcome.code == 76, outcome.output
    assert len(asked(here.folder, "nodes")[1]) == 2 * STEPS + 2
    assert len(asked(here.folder, "nodes")[0]) == 2 * STEPS


@pytest.mark.full
def test_where_all_start_again_with_another_agent_the_job_says_so(here: Site) -> None:
    kept = ("--checkpoint-dir", str(here.folder / "agent.kept"), "--checkpoint-every", "1ms")
    outcome = run(here, "agent", *kept, extra=("--node", "--die", "1@drawn 2"))
    assert "has drawn again by step.external in step" in outcome.output
    assert outcome.code == 76, outcome.output


def test_what_cannot_be_kept_is_refused_by_its_place(here: Site) -> None:
    outcome = run(here, "odd", extra=("--odd",))
    assert outcome.code == 1
    assert "step.external: the result.seen[1]: Simulator cannot be kept" in outcome.output


def test_it_is_a_plain_call_by_itself_and_under_torchrun(tmp_path: Path) -> None:
    words = [str(SCRIPTS / "train_external.py"), "--steps", "2", "--out", str(tmp_path / "alone.out")]
    subprocess.run([sys.executable, *words], check=True, timeout=120)
    assert len((tmp_path / "alone.asked-0").read_text().splitlines()) == 4
