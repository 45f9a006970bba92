"""What holds for all tests of processes."""

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def nothing_ignored() -> Iterator[None]:
    """What is ignored here, as under `nohup` or in a shell's background, jobs would inherit, and rightly ignore too."""
    ignored = [number for number in (signal.SIGINT, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
