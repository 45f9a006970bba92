"""The guard of a server that runs as another user, whom the guard may not end."""

import os
import shutil
import signal
import subprocess
import sys

import pytest

from regrow_batch.servers import guard

NOBODY = "65534"
WITHOUT_KILL = ("setpriv", "--bounding-set", "-kill")


def can_try() -> bool:
    if os.geteuid() or shutil.which("setpriv") is None:
        return False
    words = [*WITHOUT_KILL, "setpriv", "--reuid", NOBODY, "--clear-groups", "true"]
    return subprocess.run(words, capture_output=True, timeout=60).returncode == 0


def test_a_server_of_another_user_is_told_of_and_its_guard_stays_until_it_ends() -> None:
    if not can_try():
        pytest.skip("needs root and setpriv, to run as a user who may not end others")
    server = ["setpriv", "--reuid", NOBODY, "--clear-groups", "sh", "-c", "echo runs; exec sleep 3600"]
    words = [*WITHOUT_KILL, sys.executable, "-I", "-S", guard.__file__, *server]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        pid = int(process.stdout.readline())
        try:
            assert process.stderr.readline() == b"runs\n"
            process.stdin.write(guard.ASK)
            process.stdin.flush()
            assert b"runs as another user" in process.stderr.readline()
            assert process.poll() is None
        finally:
            os.kill(pid, signal.SIGKILL)
        assert process.wait(120) == -signal.SIGKILL, "it ends as the server did"
