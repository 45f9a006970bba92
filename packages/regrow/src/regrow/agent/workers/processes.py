"""The kernel's view of processes: parents, sessions, states. Linux only."""

import contextlib
import ctypes
import os
import platform
import signal
import struct
from collections.abc import Iterator
from typing import NamedTuple

from regrow.core.errors import UsageError

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36

_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
_TURN_NS = 100_000
_RESET_ON_FORK = 1
_PF_EXITING = 0x4
_STAT_FLAGS = 9 - 3
_STAT_USER = 14 - 3
_STAT_SYSTEM = 15 - 3
_STAT_EXIT_CODE = 52 - 3
"""Field of `/proc/<pid>/stat` by its number in proc(5), counted from the third field."""

_libc = ctypes.CDLL(None, use_errno=True)


def call_process(name: str) -> None:
    """Set the name of the calling process in `ps -o comm` and `top`, cut to 15 bytes."""
    buffer = ctypes.create_string_buffer(name.encode()[:15])
    _libc.prctl(_PR_SET_NAME, buffer, 0, 0, 0)


def prefer_promptness() -> bool:
    """Ask the scheduler for short time slices with low latency; False if it does not support them (before Linux 6.12).

    If all cores are busy, a thread that only passes messages otherwise waits some milliseconds for its turn. This holds
    for the calling thread only; processes that it starts, workers above all, do not inherit it.
    """
    number = _SCHED_SETATTR.get(platform.machine())
    if number is None:
        return False
    try:
        nice = os.getpriority(os.PRIO_PROCESS, 0)
    except OSError:
        return False
    attributes = struct.pack("IIQiIQQQ", 48, 0, _RESET_ON_FORK, nice, 0, _TURN_NS, 0, 0)
    return bool(_libc.syscall(number, 0, attributes, 0) == 0)


class ProcessStat(NamedTuple):
    """One line of `/proc/<pid>/stat`. `state`: one letter; T: stopped, Z: ended but not reaped."""

    pid: int
    state: str
    parent: int
    group: int
    session: int


def die_with_parent(signal_number: int) -> bool:
    """Order the kernel to send this signal to the calling process when its parent ends; 0 cancels this.

    Only a parent that ends after this call counts: compare `os.getppid()` afterwards. Returns False if the kernel
    refuses; then a parent that is killed may leave this process behind, without any other difference.
    """
    return bool(_libc.prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0) == 0)


ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask for an end. They often go to all processes of a job; the agent decides about its children."""


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Keep signals from ending a process that is started in this context before it can call `heed_nobody`."""
    former = signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


def heed_nobody() -> None:
    """Ignore signals that ask for an end, even earlier ones, in the calling process, which the agent ends itself."""
    for number in ENDS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDS)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends. Raises `UsageError` if the kernel refuses."""
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        why = os.strerror(ctypes.get_errno())
        raise UsageError(
            f"the system call prctl(PR_SET_CHILD_SUBREAPER) is refused here: {why}",
            hint="without it orphaned workers could not be ended; allow it in the container's seccomp profile",
        )


def _stat_fields(pid: int) -> list[bytes] | None:
    """Fields of `/proc/<pid>/stat` after the name; None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text[text.rindex(b")") + 2 :].split()


def stat_of(pid: int) -> ProcessStat | None:
    """The state of a process; None if there is no such process."""
    fields = _stat_fields(pid)
    if fields is None:
        return None
    return ProcessStat(pid, fields[0].decode(), int(fields[1]), int(fields[2]), int(fields[3]))


def exit_code_of(pid: int) -> int | None:
    """The exit code, as from `waitpid`, of a process whose main thread is exiting; None for any other."""
    fields = _stat_fields(pid)
    if fields is None:
        return None
    if not int(fields[_STAT_FLAGS]) & _PF_EXITING:
        return None
    return os.waitstatus_to_exitcode(int(fields[_STAT_EXIT_CODE]))


def catches(pid: int, number: int) -> bool:
    """True if a process has a handler for a signal that would end it. Python removes its handlers when it ends."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/{pid}/status", "rb") as file:
        for line in file:
            if line.startswith(b"SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def is_in_signal(pid: int, number: int) -> bool:
    """True if a signal is pending for a process, or its main thread is in the handler of the signal."""
    held = 0
    with contextlib.suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/{pid}/status", "rb") as file:
        for line in file:
            if line.startswith((b"SigPnd:", b"ShdPnd:", b"SigBlk:")):
                held |= int(line.split()[1], 16)
    return bool(held >> (number - 1) & 1)


def all_processes() -> list[ProcessStat]:
    """Every process that this one can see."""
    found = (stat_of(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return [stat for stat in found if stat is not None]


def processor_times() -> Iterator[tuple[int, int, str, float]]:
    """For every visible process: its id, its session, its state, and the CPU seconds that it has used."""
    ticks = os.sysconf("SC_CLK_TCK")
    for name in os.listdir("/proc"):
        if name.isdigit() and (fields := _stat_fields(int(name))) is not None:
            used = int(fields[_STAT_USER]) + int(fields[_STAT_SYSTEM])
            yield int(name), int(fields[3]), fields[0].decode(), used / ticks


def own_children() -> list[int]:
    """The direct children of the calling process, including adopted ones and zombies."""
    return children_of(os.getpid())


def children_of(parent: int) -> list[int]:
    """The direct children of a process, including zombies; none if it has ended."""
    children: list[int] = []
    try:
        for task in os.listdir(f"/proc/{parent}/task"):
            with open(f"/proc/{parent}/task/{task}/children", "rb") as file:
                children.extend(int(pid) for pid in file.read().split())
    except (FileNotFoundError, ProcessLookupError):  # No CONFIG_PROC_CHILDREN in the kernel, or a thread just ended.
        return [stat.pid for stat in all_processes() if stat.parent == parent]
    return children


def threads() -> int:
    """Number of threads of the calling process, including those of libraries."""
    return len(os.listdir("/proc/self/task"))


def ring(pid: int, descriptor: int, inode: int) -> bool:
    """Write into a pipe of a process, enough for all of its readers; False if the pipe no longer exists."""
    with contextlib.suppress(OSError):
        pipe = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_NONBLOCK)
        try:
            return os.fstat(pipe).st_ino == inode and os.write(pipe, bytes(1024)) > 0
        finally:
            os.close(pipe)
    return False
