"""Batches are made once a node, ahead of the workers, and are those that each worker would have made itself."""

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest
from tests.process.cached import BATCH, MICRO, MICROBATCHES, STEPS, WORLD, Reading, train_cached
from tests.process.launching import PATIENCE, Site, site
from tests.process.training import SCRIPTS, Fault, assert_equal

ALL = STEPS * WORLD * BATCH


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("producer")) as made:
        yield made
        made.assert_nothing_left()


@pytest.fixture(scope="module")
def uncached(here: Site) -> Reading:
    """torch's own DataLoader, in every worker."""
    reading = train_cached(here, "uncached", "--loader", "torch", "--sample-s", "0")
    assert reading.outcome.code == 0, reading.outcome.output
    assert reading.by_producer.total() == 0
    return reading


@pytest.mark.parametrize("loader", ["regrow", "cached"])
@pytest.mark.parametrize("workers", ["0", "2"])
def test_every_sample_is_read_once_and_training_is_the_same_as_without_a_cache(
    here: Site, uncached: Reading, loader: str, workers: str
) -> None:
    reading = train_cached(here, f"{loader}-{workers}", "--loader", loader, "--workers", workers)
    assert_equal(reading.outcome, uncached.outcome, faults=0)
    assert reading.again == 0
    assert reading.by_producer.total() + reading.by_workers.total() == ALL
    assert reading.by_producer.total() >= ALL // 2, "the producer came too late to be of use"


def test_what_ranks_tell_each_other_before_their_loader_is_never_taken_from_a_producer_that_missed_it(
    here: Site,
) -> None:
    own = train_cached(here, "told-own", "--loader", "torch", "--sample-s", "0", "--told")
    reading = train_cached(here, "told", "--loader", "regrow", "--told")
    assert_equal(reading.outcome, own.outcome, faults=0)
    assert "workers make the batches of loader 0 themselves: what the script has made" in reading.outcome.output
    assert not reading.by_producer


@pytest.mark.parametrize("workers", ["0", "2"])
def test_so_it_is_with_micro_batches(here: Site, workers: str) -> None:
    each_its_own = train_cached(here, f"own-{workers}", *MICRO, "--loader", "torch", "--sample-s", "0")
    assert each_its_own.outcome.code == 0 and not each_its_own.by_producer, each_its_own.outcome.output
    reading = train_cached(here, f"micro-{workers}", *MICRO, "--workers", workers)
    assert_equal(reading.outcome, each_its_own.outcome, faults=0)
    assert reading.again == 0
    every = STEPS * MICROBATCHES * BATCH
    assert reading.by_producer.total() + reading.by_workers.total() == every
    assert reading.by_producer.total() >= every // 2, "the producer came too late to be of use"


def test_a_job_of_one_rank_ends_as_plain_python_does(here: Site) -> None:
    reading = train_cached(here, "one", "--sample-s", "0.002", world=1)
    out = here.folder / "plain.out"
    words = ["--steps", str(STEPS), "--out", str(out), "--reads", str(here.folder / "plain.reads")]
    subprocess.run(
        [sys.executable, str(SCRIPTS / "train_cached.py"), *words, "--batch", str(BATCH), "--sample-s", "0"],
        env=here.environment(),
        check=True,
        timeout=PATIENCE,
    )
    assert reading.outcome.code == 0, reading.outcome.output
    assert reading.outcome.finals[0] == json.loads(out.with_suffix(".0.json").read_text())
    assert reading.by_producer.total() >= STEPS
    assert reading.again == 0


@pytest.mark.parametrize("how", ["corrupt", "truncate"])
def test_damaged_entries_are_made_anew(here: Site, uncached: Reading, how: str) -> None:
    reading = train_cached(here, how, "--pause", "0.02", "--sample-s", "0.001", "--at", f"5:{how}")
    assert_equal(reading.outcome, uncached.outcome, faults=0)
    # Rank 0's for step 5 was in use, the others' may have been, and what comes next was looked at ahead of time.
    at_most = (STEPS - 5) * WORLD * BATCH
    assert at_most - 2 * WORLD * BATCH <= reading.again <= at_most


@pytest.mark.parametrize("workers", ["0", "1"])
def test_an_error_of_the_data_set_ends_the_job_with_its_own_traceback(here: Site, workers: str) -> None:
    reading = train_cached(here, f"bad-{workers}", "--bad", "77", "--workers", workers)
    assert reading.outcome.code == 1
    assert "ValueError: sample 77 is broken" in reading.outcome.output
    assert "in __getitem__" in reading.outcome.output
    assert not reading.outcome.finals


def test_a_worker_that_takes_a_lost_ones_place_gets_the_batches_that_an_iterable_had_given(here: Site) -> None:
    kills = [Fault(rank=1, step=9, at="forward"), Fault(rank=0, step=13, at="update")]
    reading = train_cached(here, "iterable", "--loader", "iterable", "--sample-s", "0", faults=kills)
    outcome = reading.outcome
    assert outcome.code == 0, outcome.output
    assert len(outcome.ledger.injected) == len(kills)
    sums = {
        (step, rank): {commit.metrics["batch"] for commit in commits if "batch" in commit.metrics}
        for (step, rank), commits in outcome.ledger.history.items()
    }
    assert {at for at, given in sums.items() if len(given) > 1} == set()
    assert len(outcome.losses) == STEPS * WORLD
