"""Check that a signal that was sent to a process has been dealt with."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import psutil

from regrow.agent.workers.processes import is_in_signal

PATIENCE = 60.0
SCRIPT = """
import faulthandler, os, signal, time
end = int(os.environ["END"])
faulthandler.register(signal.SIGUSR2, file=end)
print("ready", flush=True)
time.sleep(600)
"""


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_signal_is_pending_then_handled_then_done() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    filled = 0
    try:
        while True:
            filled += os.write(writer, b"." * 4096)
    except BlockingIOError:
        os.set_blocking(writer, True)
    words = [sys.executable, "-c", SCRIPT]
    process = subprocess.Popen(words, pass_fds=[writer], env={**os.environ, "END": str(writer)}, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        assert not is_in_signal(process.pid, signal.SIGUSR2)
        process.send_signal(signal.SIGSTOP)
        until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
        process.send_signal(signal.SIGUSR2)
        assert is_in_signal(process.pid, signal.SIGUSR2), "who is stopped takes no other signal"
        process.send_signal(signal.SIGCONT)
        time.sleep(0.2)
        assert is_in_signal(process.pid, signal.SIGUSR2), "its handler waits for room in the pipe"
        while filled > 0:
            filled -= len(os.read(reader, filled))
        until(lambda: not is_in_signal(process.pid, signal.SIGUSR2))
        assert b"in <module>" in os.read(reader, 4096)
    finally:
        process.kill()
        process.communicate()
        os.close(reader)
        os.close(writer)
    assert not is_in_signal(process.pid, signal.SIGUSR2), "there is no such process any more"
