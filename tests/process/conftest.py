"""Site on which process tests run their jobs."""

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.register_assert_rewrite("tests.process.training")  # its assertions say what they compared

from tests.process.launching import Site, site  # noqa: E402


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Site]:
    """A site of a test's own, on which nothing may be left."""
    with site(tmp_path) as made:
        yield made
        made.assert_nothing_left()
