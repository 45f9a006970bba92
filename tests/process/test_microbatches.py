"""The global batch of a step is dealt out in micro-batches: the same gradient in any world, reduced once a step."""

import json
from collections.abc import Iterator

import pytest
from tests.process.launching import Site, site
from tests.process.training import Fault, Outcome, assert_equal, train

SCRIPT, STEPS = "train_micro.py", 18
"""Enough steps that an epoch ends within them, with a smaller batch."""
EXACT = ("--double", "--tokens")
TOLERANCE = 1e-12
"""Of parameters and losses after all steps, in double precision: the sums are the same up to their order."""


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("micro")) as made:
        yield made
        made.assert_nothing_left()


def run(
    here: Site, name: str, world: int, *more: str, faults: list[Fault] | None = None, steps: int = STEPS
) -> Outcome:
    outcome = train(here, name, world=world, steps=steps, script=SCRIPT, extra=more, faults=faults)
    assert outcome.code == 0, outcome.output
    return outcome


def parameters(outcome: Outcome, rank: int = 0) -> list[float]:
    values: list[float] = outcome.finals[rank]["parameters"]  # type: ignore[assignment]
    return values


def collectives(here: Site, name: str, rank: int = 0) -> list[dict[str, int]]:
    """Number of calls of each collective on a rank, for each step."""
    counts: list[dict[str, int]] = json.loads((here.folder / f"{name}.{rank}.calls").read_text())
    return counts


@pytest.fixture(scope="module")
def alone(here: Site) -> Outcome:
    """One replica without any wrapper."""
    return run(here, "alone", 1, "--mode", "plain", *EXACT)


@pytest.mark.parametrize(
    ("mode", "world", "microbatches"),
    [("ddp", 1, 8), ("ddp", 2, 8), ("ddp", 3, 8), ("ddp", 4, 8), ("hsdp", 4, 4), ("hsdp", 6, 4), ("fsdp2", 2, 4)],
)
def test_any_world_trains_on_the_same_batches(
    here: Site, alone: Outcome, mode: str, world: int, microbatches: int
) -> None:
    """Shards read parts of a micro-batch: 4 micro-batches over shards of 2 are the same 8 parts."""
    name = f"{mode}-{world}"
    outcome = run(here, name, world, "--mode", mode, "--microbatches", str(microbatches), *EXACT)
    assert parameters(outcome) == pytest.approx(parameters(alone), abs=TOLERANCE)
    for rank in range(world):
        assert [outcome.losses[step, rank] for step in range(STEPS)] == pytest.approx(
            [alone.losses[step, 0] for step in range(STEPS)], abs=TOLERANCE
        )


@pytest.mark.parametrize(("mode", "world"), [("plain", 1), ("ddp", 2), ("ddp", 3)])
def test_the_gradient_is_that_of_the_mean_over_all_samples(here: Site, mode: str, world: int) -> None:
    """Micro-batches of one, two and three samples, in unequal shares; the script compares."""
    run(here, f"check-{mode}-{world}", world, "--mode", mode, "--double", "--no-dropout", "--check", steps=6)


def test_gradients_are_reduced_once_a_step(here: Site) -> None:
    once = run(here, "once", 2, "--microbatches", "2", steps=6)
    often = run(here, "often", 2, "--microbatches", "9", steps=6)
    assert once.losses.keys() == often.losses.keys()
    assert collectives(here, "often") == collectives(here, "once")
    # Two buckets of DDP's, and the weights and losses of all micro-batches.
    assert collectives(here, "often") == [{"allreduce": 3}] * 6


def test_shards_are_reduced_once_a_step(here: Site) -> None:
    run(here, "hsdp-once", 4, "--mode", "hsdp", "--microbatches", "2", steps=4)
    run(here, "hsdp-often", 4, "--mode", "hsdp", "--microbatches", "6", steps=4)
    for kind in ("reduce_scatter_single", "allreduce"):
        counts = [step[kind] for step in collectives(here, "hsdp-often")]
        assert counts == [step[kind] for step in collectives(here, "hsdp-once")]


def test_kills_in_the_middle_of_a_step_change_no_bit(here: Site) -> None:
    more = ("--microbatches", "8", "--loader-workers", "1")
    undisturbed = run(here, "undisturbed", 3, *more)
    faults = [Fault(0, 6, "reduce"), Fault(2, 9, "backward"), Fault(1, 12, "update")]
    outcome = run(here, "killed", 3, *more, "--cacheable", "--die", "1:4:1", faults=faults)
    assert (here.folder / "killed.died").exists()
    assert_equal(outcome, undisturbed, faults=len(faults))
    done = here.regrow("data", "verify", "killed", "--against", "undisturbed", "--json")
    proof = json.loads(done.stdout)
    assert (proof["verdict"], proof["reasons"], done.returncode) == ("proven", [], 0)
    assert (proof["steps"], proof["compared"], proof["worlds"][0]["shares"]) == (STEPS, STEPS, 8)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ("forgets", "was left without micro.backward"),
        ("leaves", "was left without micro.backward"),
        ("plain-backward", "was left without micro.backward"),
        ("twice", "had its backward already"),
    ],
)
def test_a_body_that_does_not_go_through_all_of_them_is_told(here: Site, wrong: str, why: str) -> None:
    outcome = train(here, f"wrong-{wrong}", world=2, steps=3, script=SCRIPT, extra=("--wrong", wrong))
    assert outcome.code == 1
    assert why in outcome.output


def test_fewer_micro_batches_than_replicas_are_refused(here: Site) -> None:
    outcome = train(here, "few", world=3, steps=3, script=SCRIPT, extra=("--microbatches", "2"))
    assert outcome.code == 1
    assert "2 micro-batches a step are too few for 3 replicas" in outcome.output
