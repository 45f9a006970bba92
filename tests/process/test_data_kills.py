"""With data from the node's cache, training goes straight through kills of workers and of the producer.

A batch of the loader is a rank's part of a step, or one of several micro-batches.
"""

from collections.abc import Iterator

import pytest
from tests.process.cached import BATCH, MICRO, WORLD, Reading, train_cached
from tests.process.launching import Site, site
from tests.process.training import Fault, assert_equal

STEPS = 30
STAGES = ("data", "forward", "backward", "reduce", "update", "commit")
UNDERWAY = 2 * WORLD * BATCH
"""Samples at most that a producer has begun to read and not finished: two batches of each share."""


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("data-kills")) as made:
        yield made
        made.assert_nothing_left()


@pytest.fixture(scope="module", params=[(), MICRO], ids=["batches", "micro-batches"])
def kind(request: pytest.FixtureRequest) -> tuple[str, ...]:
    words: tuple[str, ...] = request.param
    return words


@pytest.fixture(scope="module")
def undisturbed(here: Site, kind: tuple[str, ...]) -> Reading:
    reading = train_cached(here, f"undisturbed{len(kind)}", *kind, steps=STEPS)
    assert reading.outcome.code == 0, reading.outcome.output
    assert len(reading.outcome.losses) == WORLD * STEPS
    assert reading.again == 0
    return reading


@pytest.mark.parametrize("standbys", [0, 1])
def test_workers_killed_at_every_stage_read_no_sample_again(
    here: Site, kind: tuple[str, ...], undisturbed: Reading, standbys: int
) -> None:
    kills = [(stage, rank) for stage in STAGES for rank in (0, 2)]
    faults = [Fault(rank, 4 + 2 * at, stage) for at, (stage, rank) in enumerate(kills)]
    flags = ("--standby", str(standbys))
    reading = train_cached(here, f"workers-{standbys}{len(kind)}", *kind, steps=STEPS, faults=faults, flags=flags)
    assert_equal(reading.outcome, undisturbed.outcome, faults=len(faults))
    assert reading.again == 0


def test_the_producer_killed_while_it_is_idle_costs_nothing(
    here: Site, kind: tuple[str, ...], undisturbed: Reading
) -> None:
    at = ("--pause", "0.03", "--at", "3:idle", "4:kill", "20:kill")
    reading = train_cached(here, f"idle{len(kind)}", *kind, *at, steps=STEPS)
    assert_equal(reading.outcome, undisturbed.outcome, faults=0)
    assert reading.again == 0


@pytest.mark.parametrize("workers", ["0", "1"])
def test_the_producer_killed_twice_while_it_makes_a_batch(
    here: Site, kind: tuple[str, ...], undisturbed: Reading, workers: str
) -> None:
    dies = ("--workers", workers, "--producer-dies-at", "100", "350")
    reading = train_cached(here, f"making-{workers}{len(kind)}", *kind, *dies, steps=STEPS)
    assert_equal(reading.outcome, undisturbed.outcome, faults=0)
    assert 1 <= reading.again <= 2 * UNDERWAY


def test_producer_and_workers_killed(here: Site, kind: tuple[str, ...], undisturbed: Reading) -> None:
    faults = [Fault(rank, 3 + 4 * at, STAGES[at % len(STAGES)]) for at, rank in enumerate((0, 1, 2, 0, 1, 2))]
    at = ("--pause", "0.02", "--at", "6:kill", "14:kill")
    reading = train_cached(here, f"both{len(kind)}", *kind, *at, steps=STEPS, faults=faults)
    assert_equal(reading.outcome, undisturbed.outcome, faults=len(faults))
    assert reading.again <= 2 * UNDERWAY


def test_a_producer_that_is_stopped_is_not_waited_for_for_long(
    here: Site, kind: tuple[str, ...], undisturbed: Reading
) -> None:
    slowly = ("--sample-s", "0.02")  # so that it has not made all batches before the third step of slow workers
    reading = train_cached(here, f"stopped{len(kind)}", *kind, "--at", "3:stop", *slowly, steps=STEPS)
    assert_equal(reading.outcome, undisturbed.outcome, faults=0)
    assert reading.by_workers.total() > WORLD * BATCH
    assert reading.again <= UNDERWAY
