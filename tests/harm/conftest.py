"""Fixtures of the tests of habits."""

from collections.abc import Iterator

import pytest
from tests.harm.runs import References


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Iterator[References]:
    made = References(tmp_path_factory.mktemp("references"))
    yield made
    made.close()
