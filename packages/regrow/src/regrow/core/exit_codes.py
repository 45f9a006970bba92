"""Exit codes of launchers, which schedulers read, and of workers; and their description for people."""

import signal

OK = 0
SCRIPT_ERROR = 1
"""An error of the script: another run would end the same way."""
REFUSED = 1
"""A running job refuses a command's request."""
USAGE = 2
"""A flag or an argument is wrong."""
INTERNAL_ERROR = 70
"""A defect of regrow (`EX_SOFTWARE`)."""
RUN_AGAIN = 75
"""A failure of the machines, not of the script: the job may be started again as it is."""
UNPROVEN = 76
"""The job was trained to its end, but its result is not proven to equal that of a faultless run: check it first."""
ERRORS_NOT_THEIRS = 77
"""A batch with complete output, in which some rows are errors not known to be the rows' own fault: send them again."""

LOST_AGENT = 1
"""A worker whose agent is gone: there is nobody left to work for."""
ON_DEMAND = 17
"""A worker that was ended by an injected fault (`exit`)."""
DEVICE_FAILED = 18
"""A worker that ends because its accelerator does not answer any more."""
NODE_LOST = -9
"""Recorded for the workers of a lost node, whose end nobody saw."""


def exit_text(code: int, *, memory: bool = False) -> str:
    """Describe the end of a process. `memory`: the kernel ended it because memory had run out."""
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
