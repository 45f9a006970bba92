"""Site on which process tests run their jobs."""

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.register_assert_rewrite("tests.process.training")  # its assertions say what they compared

from tests.process.launching import Site, site  # noqa: E402
from tests.process.training import Outcome, train  # noqa: E402
from tests.standin.building import Unbuildable, library  # noqa: E402


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Site]:
    """A site of a test's own, on which nothing may be left."""
    with site(tmp_path) as made:
        yield made
        made.assert_nothing_left()


@pytest.fixture(scope="session")
def standin_built() -> None:
    """The stand-in device, without which a test is skipped."""
    try:
        library()
    except Unbuildable as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="module")
def standin_site(standin_built: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A site of a file of tests on the stand-in, on which nothing may be left."""
    with site(tmp_path_factory.mktemp("standin")) as made:
        yield made
        made.assert_nothing_left()


@pytest.fixture(scope="module")
def on_the_processor(standin_site: Site) -> Outcome:
    """The small training of two ranks, undisturbed on the processor: sums of two are the same in any order."""
    outcome = train(standin_site, "undisturbed", world=2, steps=16)
    assert outcome.code == 0, outcome.output
    assert len(outcome.losses) == 2 * 16
    return outcome
