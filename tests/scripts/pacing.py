"""Pauses of test scripts, for a test that does something to their job meanwhile."""

import time
from pathlib import Path

LONGEST_S = 2.0
HELD_S, HELD_STEPS = 5.0, 80
"""With a file `hold` the last steps last this long: minutes, without a stop that would keep a boundary from coming."""


def pause(pace: float, step: int, steps: int) -> None:
    """Make a step last longer, by `pace` seconds at first and more towards the end, until there is a file `hurry`.

    So a slow machine does not find the training over before the test has come to its point.
    """
    if not pace:
        return
    seconds = min(LONGEST_S, pace * steps / max(1, steps - step))
    if steps - step <= HELD_STEPS and Path("hold").exists():
        seconds = HELD_S
    until = time.monotonic() + seconds
    while not Path("hurry").exists() and (left := until - time.monotonic()) > 0:
        time.sleep(min(0.1, left))
