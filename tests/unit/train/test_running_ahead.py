"""The host of a training runs ahead of its accelerator, and tells of a step when the device has done it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.standin import ahead
from tests.standin.building import Unbuildable, library

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def ended() -> dict[str, str]:
    """Error of each check, in a process of their own."""
    try:
        library()
    except Unbuildable as reason:
        pytest.skip(str(reason))
    words = [sys.executable, "-m", "tests.standin.ahead"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    found = dict(json.loads(line) for line in done.stdout.splitlines())
    assert done.returncode == 0, done.stderr[-4000:]
    return found


@pytest.mark.timeout(1200)  # the first of all builds the device
@pytest.mark.parametrize("name", ahead.CHECKS)
def test_on_the_stand_in(name: str, ended: dict[str, str]) -> None:
    if ended[name]:
        pytest.fail(ended[name], pytrace=False)
