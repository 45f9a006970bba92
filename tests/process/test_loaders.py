"""Loaders of all kinds, and of other projects where they are installed: struck, they give the same, or are refused."""

import importlib.util
from collections.abc import Iterator

import pytest
from tests.process.launching import Site, site
from tests.process.training import Fault, Outcome, train

FULL = pytest.mark.full
FAULTS = [Fault(1, 4), Fault(0, 9, "update")]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("loaders")) as made:
        yield made
        made.assert_nothing_left()


def run(here: Site, form: str, name: str, faults: list[Fault] | None = None) -> Outcome:
    job = f"{form}-{name}"
    return train(here, job, world=2, steps=15, faults=faults, extra=(form,), script="train_loaders.py")


@pytest.mark.parametrize(
    ("form", "library"),
    [
        ("a_generator", ""),
        pytest.param("a_stream_whose_workers_stay", "", marks=FULL),
        pytest.param("itertools_of_a_builtin", "", marks=FULL),
        pytest.param("an_object_with_epochs", "", marks=FULL),
        pytest.param("a_subclass_with_its_own_iteration", "", marks=FULL),
        pytest.param("torchdata_over_rows", "torchdata", marks=FULL),
        pytest.param("torchdata_over_a_stream", "torchdata", marks=FULL),
        pytest.param("torchdata_nodes", "torchdata", marks=FULL),
        pytest.param("webdataset", "webdataset", marks=FULL),
        pytest.param("datasets_rows", "datasets", marks=FULL),
        pytest.param("datasets_stream", "datasets", marks=FULL),
    ],
)
def test_who_takes_a_lost_ranks_place_reads_what_it_would_have_read(here: Site, form: str, library: str) -> None:
    if library and importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    calm, struck = run(here, form, "calm"), run(here, form, "struck", FAULTS)
    assert (calm.code, struck.code) == (0, 0), calm.output + struck.output
    # Both may be mended as one, where steps are faster than their news.
    assert sum(incident.faults for incident in struck.ledger.incidents) == len(FAULTS), struck.output
    numbers = [
        {(step, rank): told.metrics for step, ranks in each.ledger.commits.items() for rank, told in ranks.items()}
        for each in (calm, struck)
    ]
    assert len(numbers[0]) == 30 and numbers[0] == numbers[1]
    assert struck.finals == calm.finals and len(calm.finals) == 2
    assert "read the same batches" not in calm.output, "each rank has a share of its own"


@pytest.mark.full
def test_a_shuffle_that_is_seeded_by_the_clock_is_refused_by_name(here: Site) -> None:
    pytest.importorskip("webdataset")
    done = run(here, "webdataset_shuffled_by_the_clock", "calm")
    assert done.code == 1
    assert "webdataset" in done.output and "gave other samples for step 0" in done.output
    assert not done.ledger.commits
