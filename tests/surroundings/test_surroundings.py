"""A job ends with the bits that it has in ordinary surroundings, or with a sentence that names what is missing."""

import errno
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.process.launching import Site, site
from tests.surroundings.places import (
    Outcome,
    cold,
    needs_filters,
    warm,
)
from tests.surroundings.refusing import CALLS

NEEDED = {"waitid", "prctl"}
"""Without these there is no job."""
OTHERS = {"getrandom", "clone3", "sched_getaffinity"}
"""Without these Python does not start, the C library starts no thread (but with ENOSYS), and torch is not imported."""
OPTIONAL = sorted(set(CALLS) - NEEDED - OTHERS)


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Site]:
    with site(tmp_path) as made:
        yield made


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    with site(tmp_path_factory.mktemp("usual")) as made:
        done = warm(made, "usual", kills=False)
        assert done.code == 0, done.said
        yield done.sums


def assert_as_usual(done: Outcome, usual: list[str]) -> None:
    assert done.code == 0, done.said
    assert done.sums == usual, done.said


def refusing(number: str, *calls: str) -> list[str]:
    return [sys.executable, "-m", "tests.surroundings.refusing", number, ",".join(calls)]


# --- system calls ----------------------------------------------------------------------------------------------------


@needs_filters
def test_all_that_may_be_refused_is_and_the_standard_streams_are_closed(here: Site, usual: list[str]) -> None:
    done = cold(here, "bare", before=refusing("EPERM", *OPTIONAL), shell='exec "$@" 0<&- 1>&- 2>&-')
    assert_as_usual(done, usual)
    here.assert_no_process_left()


@pytest.mark.full
@needs_filters
@pytest.mark.parametrize("number", ["ENOSYS", "EINVAL"])
def test_with_other_errors_and_all_that_a_job_may_ask_for(here: Site, usual: list[str], number: str) -> None:
    flags = ("--standby", "1", "--checkpoint-dir", "saved", "--checkpoint-every", "1s")
    assert_as_usual(cold(here, "bare", *flags, before=refusing(number, *OPTIONAL)), usual)


@pytest.mark.full
@needs_filters
@pytest.mark.parametrize("number", ["ENOSYS", "EPERM"])
@pytest.mark.parametrize("call", ["pidfd_open", "pidfd_send_signal", "memfd_create", "eventfd2", "flock", "fallocate"])
def test_one_that_is_refused(here: Site, usual: list[str], call: str, number: str) -> None:
    assert_as_usual(cold(here, "one", before=refusing(number, call)), usual)


@pytest.mark.full
@needs_filters
@pytest.mark.parametrize("call", sorted(NEEDED))
def test_one_without_which_there_is_no_job_is_named_and_nothing_is_started(here: Site, call: str) -> None:
    done = cold(here, "none", before=refusing("EPERM", call))
    assert done.code == 2
    assert f"the system call {call}" in done.said and os.strerror(errno.EPERM) in done.said
    assert not (here.home / "jobs").exists() or not list((here.home / "jobs").iterdir())


# --- descriptors, forks ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "habit",
    [
        "fork-exits",
        pytest.param("fork-raises", marks=pytest.mark.full),
        pytest.param("fork-returns", marks=pytest.mark.full),
        pytest.param("fork-outlives", marks=pytest.mark.full),
        pytest.param("processes", marks=pytest.mark.full),
        pytest.param("programs", marks=pytest.mark.full),
    ],
)
def test_a_child_of_the_scripts_own_says_nothing_in_its_parents_name(here: Site, usual: list[str], habit: str) -> None:
    done = warm(here, habit, script=("--habit", habit))
    assert_as_usual(done, usual)
    assert "no step lost" in done.said


@pytest.mark.full
@pytest.mark.parametrize("closed", ["1>&-", "2>&-", "0<&-", "0<&- 1>&- 2>&-", "1>/dev/full 2>/dev/full"])
def test_streams_that_are_closed(here: Site, usual: list[str], closed: str) -> None:
    assert_as_usual(cold(here, "closed", shell=f'exec "$@" {closed}'), usual)
