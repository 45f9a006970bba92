"""What all tests share, and how a run that has not the time for all of them chooses.

`--order SEED` shuffles the files, the same way for the same seed; `--until TIME` leaves out what has not begun by then.
"""

import hashlib
import os
import signal
import sys
import time
from collections.abc import Collection, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from tests.durations import long_files
from tests.tiers import full_files, is_full, stale

# Before torch is imported anywhere: test machines are small and shared, and a step's result must not depend on them.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# On a loaded machine a single example may take long, or to draw the first ones; pytest's timeout bounds the whole test.
settings.register_profile("regrow", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("regrow")


@pytest.fixture(scope="session", autouse=True)
def warm_process() -> Iterator[None]:
    """Ends the process that jobs are forked from, if one was started."""
    yield
    launching = sys.modules.get("tests.process.launching")
    if launching is not None:
        launching.close_warm()


@pytest.fixture(scope="session", autouse=True)
def nothing_ignored() -> Iterator[None]:
    """What is ignored here, as under `nohup` or in a shell's background, jobs would inherit, and rightly ignore too."""
    ways: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    ignored = [number for number in ways if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, ways[number])
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


LONGEST_S = 200.0
LEFT_OUT = "left out: the time of this run is over"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--order", help="shuffle the files of tests by this seed, a commit's id for example")
    parser.addoption("--until", type=float, help="begin no test after this time, in seconds since the epoch")


def place(seed: str, test: str, long: Collection[str] = (), longest: Collection[str] = ()) -> bytes:
    """Where in the order of a seed a test's file stands.

    Files that take long are in the first half, the longest in the first quarter: one that came last would be waited
    for alone.
    """
    file = test.split("::")[0]
    drawn = hashlib.sha256(f"{seed} {file}".encode()).digest()
    return bytes([drawn[0] // (4 if file in longest else 2 if file in long else 1)]) + drawn[1:]


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
    seed = config.getoption("--order")
    if seed is not None:
        page = (config.rootpath / "docs" / "tests.md").read_text(encoding="utf-8")
        long, longest = long_files(page), long_files(page, over=LONGEST_S)
        items.sort(key=lambda item: place(seed, item.nodeid, long, longest))


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
