"""A newcomer of a habit is proven in a rank's shadow, and no habit that is right is called wrong."""

from collections.abc import Iterator

import pytest
from tests.harm.runs import IMPORTS
from tests.harm.shadowed import judge
from tests.harm.table import all_habits
from tests.process.launching import Site, site

HABITS = all_habits()
FEW = ("lbfgs", "moco", "scaler_that_overflows", "dropout", "micro_batches", "compiled_inside")
"""One of each kind; `python -m tests.harm.shadowed` looks at all."""


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("shadowed"), *IMPORTS) as made:
        yield made
        made.assert_nothing_left()


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", FEW)
def test_a_newcomer_of_a_habit_is_proven(here: Site, name: str) -> None:
    found, ledger, output = judge(here, HABITS[name])
    assert found == "proven", output
    assert ledger.incidents == []
