"""With which codes processes end: what a launcher's tells a scheduler, what a worker's is, and how one is said."""

import signal

OK = 0
SCRIPT_ERROR = 1
"""The script's own error: the same again would end the same way."""
REFUSED = 1
"""A running job refuses what a command asked of it."""
USAGE = 2
"""A flag or an argument cannot be right."""
INTERNAL_ERROR = 70
"""A defect of regrow (`EX_SOFTWARE`)."""
RUN_AGAIN = 75
"""The machines, not the script: the job may be started again as it is."""
UNPROVEN = 76
"""The job was trained to its end, but its result is not proven to be that of a run without faults: look at it first."""
ERRORS_NOT_THEIRS = 77
"""A batch whose output is whole, with error rows whose own fault that is not known to be: send these again."""

LOST_AGENT = 1
"""Of a worker whose agent is gone: there is nobody left to work for."""
ON_DEMAND = 17
"""Of a worker that a fault on demand ends (`exit`)."""
DEVICE_FAILED = 18
"""Of a worker that ends since its accelerator answers nothing any more."""
NODE_LOST = -9
"""Code recorded for the workers of a lost node: nobody saw their end."""


def exit_text(code: int, *, memory: bool = False) -> str:
    """Describe the end of a process. `memory`: the kernel ended it since memory had run out."""
    if memory:
        return "was ended by the kernel because memory ran out (smaller batches, fewer loaders, or a higher limit)"
    if code == DEVICE_FAILED:
        return f"exited with code {code}, as it does when its accelerator has failed"
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = {"SIGBUS": " (is /dev/shm or the disk full?)", "SIGKILL": ""}.get(name, "")
    return f"was ended by {name}{hint}"
