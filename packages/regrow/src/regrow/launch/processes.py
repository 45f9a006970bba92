"""Recognizing a launcher's process again, ending one, and how one ended."""

import signal
import subprocess
from contextlib import suppress

import psutil

from regrow.core.ids import Seconds

STOP_DEADLINE: Seconds = 30.0


def end(process: "subprocess.Popen[bytes]") -> int:
    """The exit code; a run that is still there is asked to end, then made to."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            process.send_signal(sign)
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_DEADLINE)
    return process.wait(STOP_DEADLINE)


def is_alive(pid: int, started: float) -> bool:
    """True if the process that had `pid` and started at `started` (seconds since the epoch) still runs."""
    try:
        process = psutil.Process(pid)
        return bool(process.status() != psutil.STATUS_ZOMBIE and abs(process.create_time() - started) < 2.0)
    except psutil.NoSuchProcess:
        return False


def start_time() -> float:
    """Start of this process, in seconds since the epoch."""
    return float(psutil.Process().create_time())
