"""Waits for torch's threads at the end of a process: one that still needs the interpreter would end it with SIGABRT.

A thread of gloo that has run a collective first wakes the waiting thread, and then drops its references: a Python
function, or a tensor that Python knows. If it is late and the interpreter is gone, it cannot. Destroying the groups
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
        within: longest wait, in seconds; False after that.
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
    """Voluntary context switches of each thread; None if one is awake, empty if none is visible."""
    found: dict[str, str] = {}
    for task in os.listdir(_TASKS) if _TASKS.exists() else []:
        try:
            lines = (_TASKS / task / "status").read_text().splitlines()
        except OSError:
            continue  # it has just ended
        fields = dict(line.split(":", 1) for line in lines)
        if not fields.get("Name", "").strip().startswith(_PREFIX):
            continue
        if not fields.get("State", "").lstrip().startswith("S"):
            return None
        found[task] = fields.get("voluntary_ctxt_switches", "")  # not every sandbox counts them
    return found
