"""The probes: each yields readings, announces each device by `ProbeAt`, and judges nothing.

They run in a child process (`child.py`), and import libraries that are heavy or may crash (torch, NVML) only there. The
parent uses the table below, and imports none of the probes.
"""

from typing import NamedTuple

from regrow.core.ids import Seconds


class Probe(NamedTuple):
    """One probe. `deadline`: per device. `quick`: it needs no context on an accelerator, and well under a second."""

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
"""Probes in the order in which they run, by the `source` of their verdicts. `module` has a function `read`."""

QUICK = [name for name, probe in PROBES.items() if probe.quick]
