"""TRL's trainers that generate in their step, killed: tokens, rewards and state are those of the undisturbed run."""

from collections.abc import Iterator

import pytest
from tests.process.launching import GENERATING, Site, site
from tests.process.training import Fault, Outcome, assert_equal, train

WORLD, STEPS = 2, 6
# where, which rank, behind how many updates; never both ranks between two reductions, with whom the state would go
KILLS = ("generate 1 2", "reward 0 4", "between 1 3")
FAULTS = [Fault(0, 1, "backward"), Fault(1, 3, "reduce")]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("grpo"), *GENERATING) as made:
        yield made
        made.assert_nothing_left()


def run(here: Site, name: str, words: tuple[str, ...], faults: list[Fault], kills: tuple[str, ...] = ()) -> Outcome:
    (here.folder / f"{name}.kills").write_text("\n".join(kills))
    outcome = train(here, name, world=WORLD, steps=STEPS, faults=faults, extra=words, script="train_grpo.py")
    assert outcome.code == 0, outcome.output
    assert "have read the same batches" not in outcome.output, "a group of completions spans ranks by design"
    assert len(outcome.finals) == WORLD
    died = {path.suffix for path in here.folder.glob(f"{name}.died-*")}
    assert died == {f".died-{kill.replace(' ', '-')}" for kill in kills}
    return outcome


def assert_killed_and_equal(here: Site, words: tuple[str, ...], kills: tuple[str, ...]) -> None:
    name = "".join(words)
    undisturbed = run(here, f"calm{name}", words, [])
    assert len(undisturbed.losses) == WORLD * STEPS
    assert len({str(final["digest"]) for final in undisturbed.finals.values()}) == 1
    assert_equal(run(here, f"killed{name}", words, FAULTS, kills), undisturbed, faults=len(FAULTS))


def test_both_ranks_killed_in_generation_reward_backward_and_between_updates_of_one_generation(here: Site) -> None:
    """Each generation is for two updates; a newcomer between them has its rank's completions from the other one."""
    assert_killed_and_equal(here, ("--iterations", "2"), KILLS)


@pytest.mark.full
@pytest.mark.parametrize(
    ("words", "kills"),
    [
        pytest.param((), KILLS, id="a generation an update"),
        pytest.param(
            ("--per-generation", "4", "--evaluate"), ("generate 1 0", "between 1 3", "reward 0 4"), id="buffered"
        ),
        pytest.param(("--kind", "rloo", "--iterations", "2", "--beta", "0.1"), KILLS, id="rloo"),
        pytest.param(("--beta", "0.1", "--sync", "--reward-model", "--iterations", "2"), KILLS, id="reference follows"),
        pytest.param(("--lora", "--beta", "0.1", "--per-generation", "4"), KILLS, id="lora"),
    ],
)
def test_other_kinds_killed(here: Site, words: tuple[str, ...], kills: tuple[str, ...]) -> None:
    assert_killed_and_equal(here, words, kills)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["grpo", "rloo"])
def test_it_learns_what_trls_own_does(here: Site, kind: str) -> None:
    """Generation is seeded alike on both sides, so prompts, tokens, rewards and losses can be compared."""
    words = ("--kind", kind, "--iterations", "2", "--beta", "0.1")
    ours = run(here, f"ours-{kind}", (*words, "--alike"), [])
    stock = run(here, f"stock-{kind}", (*words, "--stock"), [])
    mine, theirs = (outcome.finals[0]["history"] for outcome in (ours, stock))
    assert isinstance(mine, list) and isinstance(theirs, list)
    assert [sorted(line) for line in mine] == [sorted(line) for line in theirs]
    assert len(mine) == STEPS // 2 + 1
    for line, other in zip(mine, theirs, strict=True):
        assert line == pytest.approx(other, rel=1e-4, abs=1e-6)
    assert ours.finals[0]["completions"] == stock.finals[0]["completions"]


@pytest.mark.full
def test_a_reward_whose_mean_so_far_no_newcomer_is_told_ends_the_job_with_76(here: Site) -> None:
    killed = train(here, "mean", world=WORLD, steps=4, faults=[FAULTS[0]], extra=("--running",), script="train_grpo.py")
    assert killed.code == 76, killed.output
    assert "the reward Running continues after a fault with a different mean: give it a state_dict" in killed.output
