"""Signals that come again: soon after the first, later, and when the job has ended; its exit code stays."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from regrow.launch import console
from regrow.launch.console import Interruptions

SCRIPT = """
import asyncio, os, signal, sys
from regrow.launch.console import Interruptions

async def run():
    told = asyncio.Event()
    with Interruptions(lambda why, _: (print(why), told.set()), lambda: None) as asked:
        os.kill(os.getpid(), signal.SIGTERM)
        await told.wait()
        asked.last = sys.argv[1] == "last"

asyncio.run(run())
for number in (signal.SIGTERM, signal.SIGHUP):
    os.kill(os.getpid(), number)
print("goes on")
"""


@pytest.mark.parametrize(
    ("which", "code", "said"),
    [("last", 0, "SIGTERM was received\ngoes on\n"), ("another", -signal.SIGTERM, "SIGTERM was received\n")],
)
def test_who_asks_for_an_end_behind_the_jobs_end_gets_it_with_the_jobs_exit_code(
    which: str, code: int, said: str
) -> None:
    done = subprocess.run([sys.executable, "-uc", SCRIPT, which], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (code, said), done.stderr


@pytest.mark.parametrize(("echo", "forced"), [(60.0, 1), (-1.0, 2)])
def test_the_same_signal_soon_after_the_first_is_the_same_request_and_any_other_ends_all_at_once(
    monkeypatch: pytest.MonkeyPatch, echo: float, forced: int
) -> None:
    monkeypatch.setattr(console, "_ECHO_S", echo)
    asked = asyncio.Event()
    seen: list[str] = []

    async def run() -> None:
        with Interruptions(lambda why, _: asked.set(), lambda: seen.append("forced"), notice=signal.SIGUSR1):
            os.kill(os.getpid(), signal.SIGTERM)
            await asked.wait()
            os.kill(os.getpid(), signal.SIGTERM)  # as Slurm does, where it signals every process of a step
            os.kill(os.getpid(), signal.SIGUSR1)
            while not seen or len(seen) < forced:
                await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(run(), 60))
    assert len(seen) == forced
