"""What all tests share."""

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings

# Before torch is imported anywhere: test machines are small and shared, and a step's result must not depend on them.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# On a loaded machine a single example may take long; pytest's timeout bounds the whole test.
settings.register_profile("regrow", deadline=None)
settings.load_profile("regrow")


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
