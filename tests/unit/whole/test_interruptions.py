"""A signal that comes when a job has ended changes its exit code no more."""

import signal
import subprocess
import sys

import pytest

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
