"""The end of a process in which torch has threads: one that still needs the interpreter then ends it with SIGABRT.

A thread of gloo that has run a collective tells whoever waits for it, and then drops what it holds: a function of
Python, or a tensor that Python knows. Where it is late with that and the interpreter is gone, it cannot. To destroy the
groups joins these threads only where nothing else, such as a wrapped model, holds them.
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
    """Wait until all of torch's threads sleep, and did so between two looks, without the interpreter's lock.

    Args:
        within: how long to wait, in seconds; False after that.
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
    """Thread to how often it has slept; `None` where one is awake, empty where none can be seen."""
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
