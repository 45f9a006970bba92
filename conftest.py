"""Fixtures and options of all tests, and the choice of tests for a run without time for all.

Files come in the order of how long they take, the longest first: one that came last would be waited for alone. `--order
SEED` shuffles them, the same way for the same seed; `--until TIME` leaves out tests that have not begun by then.
"""

import gc
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from tests import durations
from tests.process.judging import ALLOWED, FULL_S, SHORT_S
from tests.process.warm_client import FOLDER
from tests.tiers import full_files, is_full, stale

# Before torch is imported anywhere: test machines are small and shared, and a step's result must not depend on them.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# On a loaded machine a single example may take long, or to draw the first ones; pytest's timeout bounds the whole test.
settings.register_profile("regrow", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("regrow")


@pytest.fixture(scope="session", autouse=True)
def warm_process() -> Iterator[None]:
    """Leaves the process that jobs are forked from; without anybody, it ends."""
    yield
    launching = sys.modules.get("tests.process.launching")
    if launching is not None:
        launching.close_warm()


@pytest.fixture(scope="session", autouse=True)
def nothing_ignored() -> Iterator[None]:
    """Take back ignored signals (from `nohup` or a shell's background): jobs would inherit and rightly ignore them."""
    ways: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    ignored = [number for number in ways if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, ways[number])
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


LEFT_OUT = "left out: the time of this run is over"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--order", help="shuffle the files of tests by this seed, a commit's id for example")
    parser.addoption("--until", type=float, help="begin no test after this time, in seconds since the epoch")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # lanes have theirs from the process that started them
        os.environ[FOLDER] = tempfile.mkdtemp(prefix="warm-", dir="/tmp")
        # `make test` has none of its own to spare; a test that is run by itself is held to all there is.
        os.environ.setdefault(ALLOWED, str(SHORT_S if "not full" in config.getoption("-m") else FULL_S))


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ.pop(FOLDER), ignore_errors=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not any("::" in word for word in config.args) and (gone := stale(item.nodeid for item in items)):
        raise pytest.UsageError(f"tests/tiers.py names tests that are not there: {', '.join(gone)}")
    for item in items:
        if is_full(item.nodeid):
            item.add_marker(pytest.mark.full)
    full = {item.nodeid.split("::")[0] for item in items if item.get_closest_marker("full")}
    if unseen := full.difference(full_files(config.rootpath)):
        raise pytest.UsageError(
            f"tests/tiers.py does not know that tests of these are full: {', '.join(sorted(unseen))}"
        )
    seconds = durations.seconds((config.rootpath / "docs" / "tests.md").read_text(encoding="utf-8"))
    items.sort(key=lambda item: durations.place(item.nodeid, seconds, config.getoption("--order")))


def pytest_collection_finish() -> None:
    """Freeze the collected tests: to look for garbage in them again and again takes longer than many a test."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    until = item.config.getoption("--until")
    if until is not None and time.time() > until:
        pytest.skip(LEFT_OUT)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if config.getoption("--until") is None:
        return
    skipped = terminalreporter.stats.get("skipped", [])
    left = sum(LEFT_OUT in str(report.longrepr) for report in skipped)
    run = sum(len(terminalreporter.stats.get(outcome, [])) for outcome in ("passed", "failed", "error"))
    terminalreporter.write_line(
        f"{run} tests were run, {left} were left out; another commit runs them in another order"
    )
