"""Identification of a launcher's process by pid and start time, and the end of one."""

import signal
import subprocess
from contextlib import suppress

import psutil

from regrow.core.ids import Seconds

STOP_DEADLINE: Seconds = 30.0


def end(process: "subprocess.Popen[bytes]") -> int:
    """End a process with SIGTERM, then SIGKILL, if it still runs; returns its exit code."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            process.send_signal(sign)
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_DEADLINE)
    return process.wait(STOP_DEADLINE)


def is_alive(pid: int, started: float) -> bool:
    """True if the process with this `pid`, which started at `started` (seconds since the epoch), still runs."""
    try:
        process = psutil.Process(pid)
        return bool(process.status() != psutil.STATUS_ZOMBIE and abs(process.create_time() - started) < 2.0)
    except psutil.NoSuchProcess:
        return False


def start_time() -> float:
    """Start time of this process, in seconds since the epoch."""
    return float(psutil.Process().create_time())
