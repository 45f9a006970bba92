"""Waits for torch's threads at the end of a process: one that still needs the interpreter would end it with SIGABRT.

A thread of gloo that has run a collective first wakes the waiting thread, and then drops its references: a Python
function, or a tensor that Python knows. If the interpreter is gone by then, it cannot drop them. Destroying the groups
joins these threads only if nothing else, such as a wrapped model, holds the groups.
"""

import os
import time
from pathlib import Path

from regrow.core.ids import Seconds

_TASKS = Path("/proc/self/task")
_PREFIX = "pt_"
"""Prefix of the names of torch's threads."""
_LOOK_S: Seconds = 0.002


def await_idle_threads(within: Seconds) -> bool:
    """Wait, without holding the GIL, until all of torch's threads sleep and have slept between two looks.

    Args:
        within: longest wait, in seconds; the result is False if it was not enough.
    """
    until = time.monotonic() + within
    before = None
    while (now := _sleeps()) is None or now != before:
        if time.monotonic() > until:
            return False
        before = now
        time.sleep(_LOOK_S)
    return True


def _sleeps() -> dict[str, str] | None:
    """Voluntary context switches of each thread; None if a thread is awake, empty if no thread is visible."""
    found: dict[str, str] = {}
    for task in os.listdir(_TASKS) if _TASKS.exists() else []:
        try:
            lines = (_TASKS / task / "status").read_text().splitlines()
        except OSError:
            continue  # the thread has just ended
        fields = dict(line.split(":", 1) for line in lines)
        if not fields.get("Name", "").strip().startswith(_PREFIX):
            continue
        if not fields.get("State", "").lstrip().startswith("S"):
            return None
        found[task] = fields.get("voluntary_ctxt_switches", "")  # not every sandbox counts context switches
    return found
