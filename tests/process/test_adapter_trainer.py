"""Hugging Face's `Trainer`, killed: state, log history and evaluations are those of the run that nobody disturbed."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.process.launching import TRAINERS, Site, site
from tests.process.training import Fault, Outcome, assert_equal, train

WORLD, STEPS = 3, 12
STAGES = ("data", "forward", "backward", "reduce", "update", "commit")
EXAMPLE = str(Path(__file__).parents[2] / "examples" / "09-hf-trainer.py")
Heard = dict[str, list[int]]


@dataclass
class Trained:
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
) -> Trained:
    outcome = train(here, name, *flags, world=WORLD, steps=steps, faults=faults, extra=extra, script="train_trainer.py")
    heard: dict[int, Heard] = {rank: final.pop("heard") for rank, final in outcome.finals.items()}  # type: ignore[misc]
    return Trained(outcome, heard)


def history(outcome: Outcome) -> list[dict[str, float]]:
    """The log history of rank 0, without what a clock has measured."""
    lines: list[dict[str, float]] = outcome.finals[0]["history"]  # type: ignore[assignment]
    return lines


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("trainer"), *TRAINERS) as made:
        yield made
        made.assert_nothing_left()


@pytest.fixture(scope="module")
def undisturbed(here: Site) -> Outcome:
    trained = run(here, "undisturbed")
    outcome = trained.outcome
    assert outcome.code == 0, outcome.output
    assert len(outcome.losses) == WORLD * STEPS
    assert len({str(final["digest"]) for final in outcome.finals.values()}) == 1
    assert len(outcome.finals) == WORLD
    assert [line["step"] for line in history(outcome) if "loss" in line] == [2, 4, 6, 8, 10, 12]
    assert [line["step"] for line in history(outcome) if "eval_loss" in line] == [4, 8, 12]
    assert_heard_once(trained, lost=set())
    return outcome


def assert_heard_once(trained: Trained, *, lost: set[int]) -> None:
    """Each step once, in order, to the last one; `lost`: ranks that were replaced, who hear from where they came in."""
    assert len(trained.heard) == WORLD
    for rank, heard in trained.heard.items():
        expected = {"begin": range(STEPS), "end": range(1, STEPS + 1), "evaluate": range(4, STEPS + 1, 4)}
        for event, steps in expected.items():
            mine = heard.get(event, [])
            assert mine == list(steps)[len(steps) - len(mine) :], (rank, event)
            assert rank in lost or len(mine) == len(steps), (rank, event)


def test_ranks_that_die_in_a_step_and_in_an_evaluation(here: Site, undisturbed: Outcome) -> None:
    """Rank 0, which logs and saves, dies in the evaluation behind step 8, and another one in a reduction."""
    died = ("--die-in-evaluation", "0", "8")
    trained = run(here, "evaluation", faults=[Fault(1, 4, "reduce")], extra=died)
    assert_equal(trained.outcome, undisturbed, faults=1)
    found = trained.outcome.ledger.incidents  # one, where the second comes before it is known that the first is mended
    assert {incident.kind for incident in found} == {"exit"} and sum(incident.faults for incident in found) == 2
    assert_heard_once(trained, lost={0, 1})


@pytest.mark.full
def test_ranks_that_die_behind_the_training(here: Site) -> None:
    """As public scripts do: `train`, then `evaluate`, `predict` and `save_model`."""
    calm = run(here, "calm-after", extra=("--after", "")).outcome
    assert calm.code == 0, calm.output
    assert len(calm.finals[0]["found"]) == 4  # type: ignore[arg-type]
    kills = "0@evaluate,1@predict,0@save,2@predict"
    died = run(here, "after", extra=("--after", kills)).outcome
    assert_equal(died, calm, faults=0)
    assert {path.suffix for path in here.folder.glob("after.died-*")} == {
        f".died-{kill.replace('@', '-')}" for kill in kills.split(",")
    }
    saved = [(here.folder / f"{name}.model" / "model.safetensors").read_bytes() for name in ("calm-after", "after")]
    assert saved[0] == saved[1]


def test_it_learns_what_the_stock_trainer_does(here: Site) -> None:
    """Its micro-batches, weighted by their tokens, make the gradient that accelerate's accumulation makes."""
    ours = run(here, "ours", steps=4, extra=("--in-order",)).outcome
    stock = run(here, "stock", steps=4, extra=("--in-order", "--stock")).outcome
    assert (ours.code, stock.code) == (0, 0), ours.output + stock.output
    mine, theirs = history(ours), history(stock)
    assert [sorted(line) for line in mine] == [sorted(line) for line in theirs]
    assert len(mine) == 4
    for line, other in zip(mine, theirs, strict=True):
        assert line == pytest.approx(other, rel=1e-5)


def test_every_stage_and_every_rank_killed_one_after_another(here: Site, undisturbed: Outcome) -> None:
    faults = [Fault(at % WORLD, 1 + at * 2, stage) for at, stage in enumerate(STAGES)]
    trained = run(here, "stages", faults=faults)
    assert_equal(trained.outcome, undisturbed, faults=len(faults))
    assert_heard_once(trained, lost=set(range(WORLD)))


def test_a_standby_takes_the_place_of_who_dies_in_an_evaluation(here: Site, undisturbed: Outcome) -> None:
    died = ("--die-in-evaluation", "0", "4")
    faults = [Fault(2, 6, "forward")]
    trained = run(here, "standby", "--standby", "1", "--warmth", "imports", faults=faults, extra=died)
    assert_equal(trained.outcome, undisturbed, faults=len(faults))
    assert "standby" in {incident.rung for incident in trained.outcome.ledger.incidents}
    assert_heard_once(trained, lost={0, 2})


def test_the_example_ends_the_same_with_a_kill_and_without(here: Site) -> None:
    plan = here.folder / "example.toml"
    plan.write_text(Fault(0, 7, "backward").toml())
    ends = []
    for name, flags in [("alone", ()), ("killed", ("--fault-plan", str(plan)))]:
        out = str(here.folder / f"example-{name}")
        run = here.regrow("run", "--job", name, "--nproc-per-node", "2", *flags, EXAMPLE, "--steps", "12", "--out", out)
        assert run.returncode == 0, run.stdout + run.stderr
        assert ("no step lost" in run.stderr) == bool(flags)
        ends.append(sorted(line for line in run.stdout.splitlines() if "12 steps, state" in line))
    assert len(ends[0]) == 2
    assert ends[0] == ends[1]
