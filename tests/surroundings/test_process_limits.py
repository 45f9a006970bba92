"""A user who may have few processes and threads: a job ends as ever, or with a sentence that names the limit."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.process.launching import Site, site
from tests.surroundings.places import Outcome, cold, needs_root, warm

_CAPABILITIES = "+dac_override,+dac_read_search"
"""Root's other users may read this checkout, and write to the test's folder; what lifts the limit is not among them."""


def limited(most: int) -> list[str]:
    """Words of a command that starts another as a user of its own, with a limit of processes and threads."""
    user = str(1_000_000 + (os.getpid() % 100_000) * 1_000 + most)  # nobody else's: the kernel counts by user
    change = ["--reuid", user, "--regid", user, "--clear-groups"]
    return [
        "setpriv",
        *change,
        f"--inh-caps={_CAPABILITIES}",
        f"--ambient-caps={_CAPABILITIES}",
        "prlimit",
        f"--nproc={most}:{most}",
    ]


def is_limited() -> bool:
    """True if the kernel holds such a user to the limit here."""
    words = [*limited(1), "sh", "-c", "true & wait $!"]
    try:
        return subprocess.run(words, capture_output=True).returncode != 0 and may_be(limited(50))
    except OSError:
        return False


def may_be(user: list[str]) -> bool:
    return subprocess.run([*user, "sh", "-c", "true & wait $!"], capture_output=True).returncode == 0


needs_limits = pytest.mark.skipif(os.geteuid() != 0 or not is_limited(), reason="users cannot be limited here")


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Site]:
    with site(tmp_path) as made:
        yield made
        made.assert_nothing_left()


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    with site(tmp_path_factory.mktemp("usual")) as made:
        yield warm(made, "usual", kills=False).sums


def under(here: Site, most: int, *flags: str) -> Outcome:
    return cold(here, f"few{most}", *flags, before=limited(most))


@needs_root
@needs_limits
@pytest.mark.parametrize("most", [1, *(pytest.param(each, marks=pytest.mark.full) for each in (5, 7, 9, 12))])
def test_too_few_for_a_job_are_named_and_no_defect_is_reported(here: Site, most: int) -> None:
    done = under(here, most)
    assert done.code in (1, 75), done.said
    assert f"this user may have {most} in all (ulimit -u)" in done.said
    assert "please report" not in done.said and "cannot join thread" not in done.said


@pytest.mark.full
@needs_root
@needs_limits
@pytest.mark.parametrize("most", [15, 17, 18, 19, 20, 22, 26])
def test_as_few_as_a_job_needs_or_nearly_so(here: Site, usual: list[str], most: int) -> None:
    done = under(here, most)
    if done.code == 0:
        assert done.sums == usual, done.said
    else:
        assert f"this user may have {most} in all (ulimit -u)" in done.said
        assert "please report" not in done.said


@pytest.mark.full
@needs_root
@needs_limits
def test_enough_for_a_job_and_not_for_all_that_would_be_good_to_have(here: Site, usual: list[str]) -> None:
    done = under(here, 30, "--standby", "1", "--checkpoint-dir", "saved", "--checkpoint-every", "1s")
    assert done.code == 0 and done.sums == usual, done.said
