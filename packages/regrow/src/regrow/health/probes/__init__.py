"""The probes: each yields readings, says by `ProbeAt` which device it turns to, and judges nothing.

They run in a child process (`child.py`); what is heavy or may crash (torch, NVML) is imported when they run. The table
is known to the parent, which therefore imports none of them.
"""

from typing import NamedTuple

from regrow.core.ids import Seconds


class Probe(NamedTuple):
    """One probe. `deadline`: for each device. `quick`: takes no context on an accelerator and well under a second."""

    module: str
    deadline: Seconds
    quick: bool = True


PROBES: dict[str, Probe] = {
    "nvml": Probe("nvml", 10.0),
    "kernel-log": Probe("kernel_log", 5.0),
    "processor": Probe("processor", 5.0),
    "memory-bandwidth": Probe("memory", 5.0),
    "disk": Probe("disk", 10.0),
    "clock": Probe("clock", 5.0),
    "network": Probe("network", 5.0),
    "accelerator": Probe("accelerator", 60.0, quick=False),
}
"""By the name that verdicts have as their source; in the order in which they run. `module` has a function `read`."""

QUICK = [name for name, probe in PROBES.items() if probe.quick]
