"""Exit codes of launchers, which schedulers read, and of workers, and a description of each for people."""

import signal

OK = 0
SCRIPT_ERROR = 1
"""The script has an error: another run would end in the same way."""
REFUSED = 1
"""A running job has refused a command's request."""
USAGE = 2
"""A flag or an argument is wrong."""
INTERNAL_ERROR = 70
"""A defect of regrow (`EX_SOFTWARE`)."""
RUN_AGAIN = 75
"""The machines failed, not the script: the job may be started again unchanged."""
UNPROVEN = 76
"""The job trained to its end, but its result is not proven to equal that of a faultless run, and must be checked."""
ERRORS_NOT_THEIRS = 77
"""A batch with complete output, some of whose errors may not be the rows' own fault: send these rows again."""

LOST_AGENT = 1
"""A worker ends because its agent is gone, so that it has nobody left to work for."""
ON_DEMAND = 17
"""A worker was ended by an injected fault (`exit`)."""
DEVICE_FAILED = 18
"""A worker ends because its accelerator no longer answers."""
NODE_LOST = -9
"""Recorded for the workers of a lost node, whose end no agent has seen."""


def exit_text(code: int, *, memory: bool = False) -> str:
    """Describe how a process ended. `memory`: the kernel ended it because memory had run out."""
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
