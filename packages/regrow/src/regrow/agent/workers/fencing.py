"""To make sure that a worker, and whatever it started, can do nothing any more.

A worker leads a session and a process group of its own, so that its loaders and subprocesses go with it. What left the
group is found by its session; what left that too ends with the agent.
"""

import contextlib
import os
import signal
import time
from collections.abc import Collection

from regrow.agent.workers.processes import all_processes, children_of, own_children, stat_of
from regrow.core.ids import Seconds
from regrow.core.process.ends import ChildEnd


def signal_group(pid: int, number: int) -> None:
    """Signal the process group that `pid` leads. No group of that number is no error.

    Of SIGKILL its resource tracker is spared, which ends by itself when the last it tracks for has: it is what removes
    the shared memory and semaphores that a killed process leaves.
    """
    spared = trackers_of(pid) if number == signal.SIGKILL else []
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if not spared:
            os.killpg(pid, number)
            return
    for stat in all_processes():
        if stat.group == pid and stat.pid not in spared:
            _kill(stat.pid)


def trackers_of(leader: int) -> list[int]:
    """Python's resource trackers in the session of a worker: children of it, or of this process since it has ended."""
    found = []
    with contextlib.suppress(OSError):  # too many files are open to look
        for pid in {*children_of(leader), *own_children()}:
            stat = stat_of(pid)
            if stat is not None and stat.session == leader and stat.state != "Z" and _is_tracker(pid):
                found.append(pid)
    return found


def own_trackers() -> list[int]:
    """Those that this process has become the parent of, and that still tidy up."""
    with contextlib.suppress(OSError):
        return [pid for pid in own_children() if _is_tracker(pid)]
    return []


def _is_tracker(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return b"multiprocessing.resource_tracker" in file.read()
    except OSError:
        return False


def kill_worker(end: ChildEnd) -> None:
    """SIGKILL to a worker and its process group; stopped ones die too."""
    with contextlib.suppress(ProcessLookupError):  # it had ended already
        end.signal(signal.SIGKILL)
    signal_group(end.pid, signal.SIGKILL)


def kill_sessions(leaders: Collection[int], *, spared: Collection[int] = ()) -> int:
    """SIGKILL to everything in the sessions of these (former) workers but `spared`; how many there were."""
    struck = 0
    for stat in all_processes():
        if stat.session in leaders and stat.state != "Z" and stat.pid not in spared:
            _kill(stat.pid)
            struck += 1
    return struck


def end_sessions(leaders: Collection[int], *, within: Seconds) -> None:
    """`kill_sessions` until nothing is left of them or the time is over. For a process that is not their parent."""
    deadline = time.monotonic() + within
    while leaders and kill_sessions(leaders) and time.monotonic() < deadline:
        time.sleep(0.01)


def sweep_orphans(kept: Collection[int], dead_leaders: Collection[int], *, spared: Collection[int] = ()) -> None:
    """Reap adopted children that have ended, kill those in the session of a dead worker.

    Args:
        spared: leaders that have only just ended, whose resource trackers may end by themselves.
        kept: children with an owner, who reaps them.
        dead_leaders: workers that have ended; an orphan of a living worker (a daemon that it started) is left alone.
    """
    for pid in own_children():
        if pid in kept:
            continue
        stat = stat_of(pid)
        if stat is None:
            continue
        tidies = stat.session in spared and _is_tracker(pid)
        if stat.state != "Z" and stat.session in dead_leaders and not tidies:
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
