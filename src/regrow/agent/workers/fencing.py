"""To make sure that a worker, and whatever it started, can do nothing any more.

A worker leads a session and a process group of its own, so that its loaders and subprocesses go with it. What left the
group is found by its session; what left that too ends with the agent.
"""

import contextlib
import os
import signal
import time
from collections.abc import Collection

from regrow.agent.workers.processes import all_processes, own_children, stat_of
from regrow.core.ids import Seconds
from regrow.core.process.ends import ChildEnd


def signal_group(pid: int, number: int) -> None:
    """Signal the process group that `pid` leads. No group of that number is no error."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def kill_worker(end: ChildEnd) -> None:
    """SIGKILL to a worker and its process group; stopped ones die too."""
    with contextlib.suppress(ProcessLookupError):  # it had ended already
        end.signal(signal.SIGKILL)
    signal_group(end.pid, signal.SIGKILL)


def kill_sessions(leaders: Collection[int]) -> int:
    """SIGKILL to everything in the sessions of these (former) workers; how many there were."""
    struck = 0
    for stat in all_processes():
        if stat.session in leaders and stat.state != "Z":
            _kill(stat.pid)
            struck += 1
    return struck


def end_sessions(leaders: Collection[int], *, within: Seconds) -> None:
    """`kill_sessions` until nothing is left of them or the time is over. For a process that is not their parent."""
    deadline = time.monotonic() + within
    while leaders and kill_sessions(leaders) and time.monotonic() < deadline:
        time.sleep(0.01)


def sweep_orphans(kept: Collection[int], dead_leaders: Collection[int]) -> None:
    """Reap adopted children that have ended, kill those in the session of a dead worker.

    Args:
        kept: children with an owner, who reaps them.
        dead_leaders: workers that have ended; an orphan of a living worker (a daemon that it started) is left alone.
    """
    for pid in own_children():
        if pid in kept:
            continue
        stat = stat_of(pid)
        if stat is None:
            continue
        if stat.state != "Z" and stat.session in dead_leaders:
            _kill(pid)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def end_children(*, within: Seconds) -> list[int]:
    """SIGKILL and reap every child of the calling process, and theirs; who was left at the deadline."""
    deadline = time.monotonic() + within
    while left := own_children():
        for pid in left:
            _kill(pid)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        if time.monotonic() > deadline:
            return own_children()
        time.sleep(0.002)
    return []


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)
