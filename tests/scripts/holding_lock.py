"""Launches of an extension that keeps the interpreter's lock while the device's queue is full."""

import os
import time
from pathlib import Path

import torch

_VICTIM = Path("victim")


def launch(times: int, victim: int = 0) -> None:
    """Launch that many kernels in one call, which first kills `victim`."""
    from standin import device  # type: ignore[import-not-found]  # placing.py has made it known

    device.load().launch_holding(torch.accelerator.current_device_index(), times, victim=victim)


def await_kill() -> None:
    """Wait to be killed by another rank; this one calls no collective any more."""
    written = _VICTIM.with_suffix(".new")
    written.write_text(str(os.getpid()))
    written.rename(_VICTIM)
    while True:
        time.sleep(1)


def victim() -> int:
    """The process that waits to be killed, once there is one."""
    while not _VICTIM.exists():
        time.sleep(0.005)
    return int(_VICTIM.read_text())
