"""The stand-in accelerator is one, and what regrow keeps of a training is kept on it as on the processor."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.standin import checks
from tests.standin.building import Unbuildable, cache_folder, library

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def ended() -> dict[str, str]:
    """Error of each check, in a process of their own."""
    try:
        library()
    except Unbuildable as reason:
        pytest.skip(str(reason))
    words = [sys.executable, "-m", "tests.standin.checks"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    found = dict(json.loads(line) for line in done.stdout.splitlines())
    assert done.returncode == 0, done.stderr[-4000:]
    return found


@pytest.mark.timeout(1200)  # the first of all builds it
@pytest.mark.parametrize("name", checks.CHECKS)
def test_on_the_stand_in(name: str, ended: dict[str, str]) -> None:
    if ended[name]:
        pytest.fail(ended[name], pytrace=False)


def test_what_was_built_lies_outside_of_the_repository() -> None:
    assert cache_folder({"REGROW_TEST_CACHE": "/there"}) == Path("/there")
    assert cache_folder({"XDG_CACHE_HOME": "/cache"}) == Path("/cache/regrow-tests")
    assert not cache_folder({}).is_relative_to(ROOT)


def test_without_a_compiler_the_reason_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("REGROW_TEST_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(Unbuildable, match="no g\\+\\+"):
        library()
