"""Micro-batches from the node's cache: made once, whoever dies, and however the world changes."""

from collections.abc import Iterator

import pytest
from tests.process.cached import BATCH, WORLD, Reading, counted, train_cached
from tests.process.elastic import Elastic
from tests.process.launching import Site, site
from tests.process.training import SCRIPTS, Fault, assert_equal, redone

STEPS, COUNT = 24, 7
MICRO = ("--microbatches", str(COUNT), "--sample-s", "0.002")
STAGES = ("data", "forward", "backward", "reduce", "update", "commit")
UNDERWAY = 2 * WORLD * BATCH
"""Samples at most that a producer has begun to read and not finished: two batches of each rank."""


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("data-micro")) as made:
        yield made
        made.assert_nothing_left()


@pytest.fixture(scope="module")
def undisturbed(here: Site) -> Reading:
    """Without a cache: each rank makes its own."""
    reading = train_cached(here, "undisturbed", *MICRO, "--loader", "torch", steps=STEPS)
    assert reading.outcome.code == 0, reading.outcome.output
    assert not reading.by_producer
    return reading


@pytest.mark.parametrize("standbys", [0, 1])
def test_workers_killed_at_every_stage_read_no_sample_again(here: Site, undisturbed: Reading, standbys: int) -> None:
    kills = [(stage, rank) for stage in STAGES for rank in (0, 2)]
    faults = [Fault(rank, 3 + at, stage) for at, (stage, rank) in enumerate(kills)]
    flags = ("--standby", str(standbys))
    reading = train_cached(here, f"workers-{standbys}", *MICRO, steps=STEPS, faults=faults, flags=flags)
    assert_equal(reading.outcome, undisturbed.outcome, faults=len(faults))
    assert reading.again == 0
    assert len(reading.by_producer + reading.by_workers) == STEPS * COUNT * BATCH


@pytest.mark.parametrize("workers", ["0", "1"])
def test_the_producer_killed_twice_while_it_makes_one(here: Site, undisturbed: Reading, workers: str) -> None:
    dies = ("--workers", workers, "--producer-dies-at", "100", "350")
    reading = train_cached(here, f"making-{workers}", *MICRO, *dies, steps=STEPS)
    assert_equal(reading.outcome, undisturbed.outcome, faults=0)
    assert 1 <= reading.again <= 2 * UNDERWAY


def test_a_producer_that_is_stopped_in_the_middle_is_not_waited_for_for_long(here: Site, undisturbed: Reading) -> None:
    reading = train_cached(here, "stopped", *MICRO, "--at", "3:stop", "--sample-s", "0.01", steps=STEPS)
    assert_equal(reading.outcome, undisturbed.outcome, faults=0)
    assert reading.by_workers
    assert reading.again <= UNDERWAY


def test_a_world_that_changes_has_what_was_made_for_the_one_before(here: Site) -> None:
    cache, reads = here.folder / "changing.cache", here.folder / "changing.reads"
    cache.mkdir()
    script = [str(SCRIPTS / "train_cached.py"), "--steps=60", f"--reads={reads}", f"--cache={cache}", *MICRO]
    words = ["run", "--job=changing", "--nproc-per-node=2", "--replicas=1:4", f"--data-cache={cache}", *script]
    with here.start(*words, "--pace=0.12") as started:
        job = Elastic(here, "changing", started)
        job.settled(2)
        for size in (4, 1, 3):
            job.reach(size)
        job.kill(job.worker("member", 2))
        job.settled(3)
        ledger = job.finish()
    assert redone(ledger) == []
    by_producer, by_workers = counted(reads)
    again = (by_producer + by_workers).total() - 60 * COUNT * BATCH
    # Of each rank that there was before a change, its loader worker may have had two under way.
    assert 0 <= again <= 2 * BATCH * sum(each.before for each in ledger.incidents), "what lay ahead was made anew"
    proof = here.regrow("data", "verify", "changing")
    assert proof.returncode == 0, proof.stdout + proof.stderr
