"""The guard of a server: whom it ends, and whom nobody may end."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from regrow.core.errors import UsageError
from regrow_batch.servers import guard, server_process
from regrow_batch.servers.server_process import ServerProcess

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
        assert process.wait(120) == guard.KILLED


def ended_groups(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Groups that this process ends from now on."""
    found: list[int] = []
    real = os.killpg

    def end(group: int, number: int) -> None:
        found.append(group)
        real(group, number)

    monkeypatch.setattr(os, "killpg", end)
    return found


async def test_the_number_of_a_server_that_was_killed_may_be_anothers_and_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    groups = ended_groups(monkeypatch)
    server = await ServerProcess.start(["sleep", "3600"])
    os.kill(server._leader, signal.SIGKILL)
    assert await server.wait() == -signal.SIGKILL
    assert groups == []


async def test_a_guard_that_forks_no_server_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mute = tmp_path / "mute.py"
    mute.write_text("import time\ntime.sleep(3600)\n")
    monkeypatch.setattr(server_process, "_GUARD", str(mute))
    monkeypatch.setattr(server_process, "_FORKED_S", 0.1)
    with pytest.raises(UsageError, match="its guard forked nothing for 0.1 s"):
        await ServerProcess.start(["sleep", "3600"])


async def test_what_a_killed_guard_has_left_is_ended_once(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = ended_groups(monkeypatch)
    server = await ServerProcess.start(["sleep", "3600"])
    leader = server._leader
    server._process.kill()
    assert await server.wait() == -signal.SIGKILL
    assert await server.wait() == -signal.SIGKILL
    assert groups == [leader]


def test_children_are_found_where_the_kernel_has_no_list_of_them() -> None:
    with subprocess.Popen(["sleep", "3600"]) as process:
        try:
            found = guard._found_children()
            assert process.pid in found
            assert sorted(found) == sorted(guard._children())
        finally:
            process.kill()
