"""How much of a processor a process takes where others want it too."""

import contextlib
import os


def step_back(nice: int) -> None:
    """Let others go first, as `nice` does; where that is refused, it takes its turn like everybody."""
    with contextlib.suppress(OSError):
        os.nice(nice)
