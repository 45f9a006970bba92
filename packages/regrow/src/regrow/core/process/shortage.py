"""Recognizes that no more processes or threads can be started, and writes the message for people."""

import errno
import resource
import traceback

_OF_THREADS = "can't start new thread"
_FORKS = ("_execute_child", "fork", "forkpty")
"""The functions in which Python starts a process."""


def short_of_processes(error: BaseException) -> str:
    """A message with the cure if the error means that no process or thread can be started; else an empty text."""
    if isinstance(error, RuntimeError) and str(error) == _OF_THREADS:
        return no_more_processes()
    if isinstance(error, OSError) and error.errno == errno.EAGAIN:
        innermost = traceback.extract_tb(error.__traceback__)[-2:]
        if any(each.name in _FORKS or "os.fork()" in (each.line or "") for each in innermost):
            return no_more_processes()
    return ""


def no_more_processes() -> str:
    """A message with the limit that was reached, as far as it is known, and its cure."""
    most, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    user = "" if most == resource.RLIM_INFINITY else f"this user may have {most} in all (ulimit -u), or "
    return f"no more processes and threads can be started: {user}the container no more (pids.max); raise the limit"
