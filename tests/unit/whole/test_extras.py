"""The line that installs an extra works where regrow came from a checkout, and where it came from an index."""

import json
from pathlib import Path

import pytest
from tests.sources import PACKAGES

from regrow.core.process import extras


class Installed:
    """A distribution as pip leaves it."""

    def __init__(self, url: str) -> None:
        self._url = url

    def read_text(self, name: str) -> str | None:
        return json.dumps({"url": self._url, "dir_info": {}}) if self._url and name == "direct_url.json" else None


def test_in_a_checkout_it_names_the_checkout() -> None:
    root = PACKAGES[0].parent / "regrow"
    assert extras.install_line.__wrapped__("plot") == f"pip install -e '{root}[plot]'"
    beside = root.with_name("regrow-batch")
    assert extras.install_line.__wrapped__(package="regrow-batch") == f"pip install -e '{beside}'"
    assert extras.install_line.__wrapped__("urls", package="regrow-batch") == f"pip install -e '{beside}[urls]'"


def test_installed_it_names_the_folder_it_came_from_or_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "__file__", str(tmp_path / "a/b/c/d/e/extras.py"))
    source = tmp_path / "my clone"
    source.mkdir()
    (source / "pyproject.toml").touch()
    for url, line in [
        (source.as_uri(), f"pip install '{source}[plot]'"),
        ((tmp_path / "gone").as_uri(), "pip install 'regrow[plot]'"),
        ("https://example.org/regrow.whl", "pip install 'regrow[plot]'"),
        ("", "pip install 'regrow[plot]'"),
    ]:
        monkeypatch.setattr("importlib.metadata.distribution", lambda _, url=url: Installed(url))
        assert extras.install_line.__wrapped__("plot") == line
        assert extras.install_line.__wrapped__(package="regrow-batch") == "pip install regrow-batch"
        assert extras.install_line.__wrapped__("urls", package="regrow-batch") == "pip install 'regrow-batch[urls]'"
