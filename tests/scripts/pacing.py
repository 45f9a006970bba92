"""Pauses of test scripts, for a test that does something to their job meanwhile."""

import time
from pathlib import Path

LONGEST_S = 2.0


def pause(pace: float, step: int, steps: int) -> None:
    """Make a step last longer, by `pace` seconds at first and more towards the end, until there is a file `hurry`.

    So a slow machine does not find the training over before the test has come to its point.
    """
    if pace and not Path("hurry").exists():
        time.sleep(min(LONGEST_S, pace * steps / max(1, steps - step)))
