"""Runs between a batch and a server that the batch starts: ends the server and its descendants when the batch ends.

A program of its own (`python guard.py COMMAND…`), so that it outlives its starter however that ends: the guard reads a
pipe, which is then closed. All descendants of the server become its children, in any session or process group.
Bytes on the pipe: `t` asks the server to end, `k` kills it. Imports nothing of regrow, since each server has a guard.
"""

import ctypes
import os
import select
import signal
import sys
import time

ASK, END = b"t", b"k"
KILLED = 128 + signal.SIGKILL
"""Exit code where SIGKILL ended the server. A guard that SIGKILL ends was itself killed, and has ended no process."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LOOK_S = 0.01
_LONGEST_S = 30.0
"""Longest wait for killed processes: one that is stuck in the kernel must not block the batch."""


def main(arguments: list[str]) -> int:
    """Run a server until it ends or the pipe is closed; its status, as `os.waitpid` returns it."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the starter decides, by the pipe
    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    server = _start(arguments, prctl)
    os.write(1, b"%d\n" % server)
    _let_go_of_output()
    status = _watch(server, woken)
    _end_all(server)
    return status


def _start(arguments: list[str], prctl: "ctypes._NamedFuncPointer") -> int:
    """Fork the server, with its output to our standard error stream."""
    guard = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != guard:
            os._exit(1)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(2, 1)
        os.execvp(arguments[0], arguments)
    except OSError as error:
        os.write(2, f"{arguments[0]} cannot be started: {error.strerror}\n".encode())
    os._exit(127)


def _let_go_of_output() -> None:
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)


def _watch(server: int, woken: int) -> int:
    """Wait for the server's end, or the pipe's; the server's status, 0 if it still runs."""
    while True:
        ready, _, _ = select.select([0, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            status = _reap(server)
            if status is not None:
                return status
        if 0 in ready:
            asked = os.read(0, 64)
            if not asked or END in asked:
                return 0
            _signal_group(server, signal.SIGTERM)


def _reap(server: int) -> "int | None":
    """Reap children that have ended; the server's status if it is among them."""
    found = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if not pid:
            return found
        if pid == server:
            found = status


def _end_all(server: int) -> None:
    """Kill the server's group and each child; orphans of the killed processes become children in turn."""
    _signal_group(server, signal.SIGKILL)
    by = time.monotonic() + _LONGEST_S
    while time.monotonic() < by:
        for pid in _children():
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue  # it has already ended, or is another user's: the others are still killed
        _reap(server)
        if not _children():
            return
        time.sleep(_LOOK_S)


def _children() -> list[int]:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as stream:
            return [int(pid) for pid in stream.read().split()]
    except FileNotFoundError:  # a kernel without CONFIG_PROC_CHILDREN
        return _found_children()


def _found_children() -> list[int]:
    """The children, found by a look at all processes."""
    own, found = str(os.getpid()), []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/stat") as stream:
                parent = stream.read().rpartition(")")[2].split()[1]
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended meanwhile
        if parent == own:
            found.append(int(pid))
    return found


def _signal_group(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return  # it has ended
    except PermissionError:
        os.write(2, b"the server runs as another user, who alone can end it\n")


def _end_like(status: int) -> None:
    """End as the server did, so that the parent of this process sees the server's status."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number == signal.SIGKILL:
            sys.exit(KILLED)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    sys.exit(os.WEXITSTATUS(status) if os.WIFEXITED(status) else 1)


if __name__ == "__main__":
    _end_like(main(sys.argv[1:]))
