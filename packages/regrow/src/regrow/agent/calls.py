"""Checks before a job starts: that no filter refuses a needed system call, and that there is a temporary folder."""

import errno
import mmap
import os
import socket
import tempfile
from collections.abc import Callable

from regrow.core.errors import REFUSALS, UsageError
from regrow.core.net import is_own, sockets_home, unix_address


def check_calls() -> None:
    """Raise `UsageError` with the name of a system call that is refused."""
    for name, use in _NEEDED.items():
        try:
            use()
        except OSError as error:
            if error.errno in REFUSALS:
                raise UsageError(
                    f"the system call {name} is refused here: {error.strerror or error}",
                    hint="regrow cannot do without; allow it in the container's seccomp profile",
                ) from error
            raise


def check_temporary_folder() -> None:
    """Raise `UsageError` if there is no temporary folder; Python, torch and loaders would fail with a traceback."""
    try:
        tempfile.gettempdir()
    except FileNotFoundError as error:
        raise UsageError(
            f"no temporary folder can be written to: {error.strerror or error}",
            hint="set TMPDIR to a folder that you may write to; where all else is read-only, use /dev/shm",
        ) from error


def _wait_for_a_child() -> None:
    try:
        os.waitid(os.P_PID, os.getpid(), os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return


def _call_a_name() -> None:
    name = unix_address(f"{sockets_home()}/probe")
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as caller:
        listener.bind(name)
        listener.listen()
        caller.connect(name)
        if not is_own(caller):
            raise OSError(errno.EPERM, "the kernel does not report the owner of a socket")


def _pass_a_descriptor() -> None:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with one, other:
        socket.send_fds(one, [b"x"], [one.fileno()])
        _, descriptors, _, _ = socket.recv_fds(other, 1, 1)
        for descriptor in descriptors:
            os.close(descriptor)


def _share_memory() -> None:
    mmap.mmap(-1, mmap.PAGESIZE).close()


_NEEDED: dict[str, Callable[[], None]] = {
    "waitid": _wait_for_a_child,
    "bind, connect or getsockopt of unix sockets": _call_a_name,
    "sendmsg with descriptors": _pass_a_descriptor,
    "mmap of shared memory": _share_memory,
}
