"""A process's own precautions: closed streams, refused calls, forks."""

import errno
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from regrow.agent import calls
from regrow.core.errors import UsageError
from regrow.core.process.ends import ChildEnd
from regrow.core.process.forks import keep_from_forks
from regrow.core.process.memory_file import is_memory_file, memory_file, reserve

PATIENCE = 60.0


def refused(number: int) -> Callable[..., Any]:
    def call(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return call


@pytest.fixture(params=["pidfd", "ENOSYS", "EPERM"])
def child(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    if request.param != "pidfd":
        monkeypatch.setattr(os, "pidfd_open", refused(getattr(errno, request.param)))
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process.pid
    process.kill()
    process.wait()


def test_the_end_of_a_child_is_heard_with_and_without_a_pidfd(child: int) -> None:
    end, heard = ChildEnd(child), threading.Event()
    assert not end.wait(0.0)
    if end.descriptor is None:
        end.watch(heard.set)
    end.signal(signal.SIGKILL)
    assert end.wait(PATIENCE)
    assert end.descriptor is not None or heard.wait(PATIENCE)
    end.close()
    assert os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT) is not None, "it is not reaped"


def test_a_signal_arrives_where_its_newer_call_is_refused(monkeypatch: pytest.MonkeyPatch, child: int) -> None:
    monkeypatch.setattr(signal, "pidfd_send_signal", refused(errno.EPERM))
    end = ChildEnd(child)
    end.signal(signal.SIGKILL)
    assert end.wait(PATIENCE)
    end.close()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_what_is_only_short_is_raised_to_be_tried_again(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(os, "pidfd_open", refused(number))
    with pytest.raises(OSError, match=os.strerror(number)):
        ChildEnd(os.getpid())


@pytest.mark.parametrize("way", ["memfd", "file"])
@pytest.mark.parametrize("sealed", [False, True])
def test_memory_without_a_name_is_shared_by_its_descriptor(
    monkeypatch: pytest.MonkeyPatch, way: str, sealed: bool
) -> None:
    if way == "file":
        monkeypatch.setattr(os, "memfd_create", refused(errno.ENOSYS))
        monkeypatch.setattr(os, "posix_fallocate", refused(errno.EPERM))
    descriptor = memory_file("regrow-test", sealed=sealed)
    reserve(descriptor, 3 << 20)
    assert os.fstat(descriptor).st_size == 3 << 20
    assert os.fstat(descriptor).st_nlink == 0
    assert is_memory_file(descriptor, "regrow-test", sealed=sealed)
    assert not is_memory_file(0, "regrow-test")
    os.close(descriptor)


def test_a_call_without_which_there_is_no_job_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    calls.check_calls()
    monkeypatch.setattr(os, "waitid", refused(errno.EPERM))
    with pytest.raises(UsageError, match="the system call waitid is refused"):
        calls.check_calls()


def test_where_no_temporary_folder_can_be_written_to_it_is_said_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    calls.check_temporary_folder()
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc/nowhere"])
    with pytest.raises(UsageError, match="no temporary folder can be written to") as told:
        calls.check_temporary_folder()
    assert "TMPDIR" in (told.value.hint or "")


def in_a_fork(work: Callable[[], object]) -> int:
    pid = os.fork()
    if pid == 0:
        code = 2
        try:
            code = int(bool(work()))
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_fork_has_none_of_the_connections_and_its_parent_keeps_them() -> None:
    ours, theirs = socket.socketpair()
    keep_from_forks(ours)
    number = ours.fileno()

    def has_it() -> bool:
        try:
            os.fstat(number)
        except OSError:
            return False
        return True

    assert in_a_fork(has_it) == 0
    ours.sendall(b"x")
    assert theirs.recv(1) == b"x"
    ours.close()
    theirs.close()


def test_a_fork_that_ends_as_pythons_do_says_no_goodbye() -> None:
    source = """
import os, sys
from regrow.core.process.forks import at_exit, not_at_exit
at_exit(lambda: print("goodbye", flush=True))
at_exit(other := lambda: print("not said", flush=True))
not_at_exit(other)
pid = os.fork()
if pid == 0:
    sys.exit(0)
os.waitpid(pid, 0)
"""
    said = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True).stdout
    assert said == "goodbye\n"


@pytest.mark.parametrize("closed", ["0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_closed_streams_are_there_and_take_text(closed: str) -> None:
    source = """
import os, sys
from regrow.core.process.streams import open_standard_streams
open_standard_streams()
print("x"); sys.stderr.write("y"); sys.stdin.read()
opened = os.open("/dev/null", os.O_RDONLY)
sys.exit(0 if opened > 2 and all(os.get_inheritable(n) for n in range(3)) else 1)
"""
    done = subprocess.run(["sh", "-c", f'"$@" {closed}', "sh", sys.executable, "-c", source], stdin=subprocess.DEVNULL)
    assert done.returncode == 0
