"""Ends a worker, and everything that it started, with certainty.

A worker leads its own session and process group, so that its loaders and subprocesses end with it. Processes that left
the group are found by the session; processes that left the session too end with the agent.
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
    """Signal the process group that `pid` leads. It is no error if there is no such group.

    SIGKILL spares the worker's resource tracker, which removes shared memory and semaphores that a killed process
    leaves, and which ends by itself after the last process that it tracks for.
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
    """Python's resource trackers in a worker's session: children of the worker, or, after its end, of this process."""
    found = []
    with contextlib.suppress(OSError):  # Too many files are open for the search.
        for pid in {*children_of(leader), *own_children()}:
            stat = stat_of(pid)
            if stat is not None and stat.session == leader and stat.state != "Z" and _is_tracker(pid):
                found.append(pid)
    return found


def own_trackers() -> list[int]:
    """Resource trackers that this process has adopted and that still clean up."""
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
    """Send SIGKILL to a worker and its process group; stopped processes die too."""
    with contextlib.suppress(ProcessLookupError):  # The worker had ended already.
        end.signal(signal.SIGKILL)
    signal_group(end.pid, signal.SIGKILL)


def kill_sessions(leaders: Collection[int], *, spared: Collection[int] = ()) -> int:
    """Send SIGKILL to all processes in the sessions of these (former) workers except `spared`; returns their number."""
    struck = 0
    for stat in all_processes():
        if stat.session in leaders and stat.state != "Z" and stat.pid not in spared:
            _kill(stat.pid)
            struck += 1
    return struck


def end_sessions(leaders: Collection[int], *, within: Seconds) -> None:
    """Repeat `kill_sessions` until no process is left or the time is over; for a caller that is not their parent."""
    deadline = time.monotonic() + within
    while leaders and kill_sessions(leaders) and time.monotonic() < deadline:
        time.sleep(0.01)


def sweep_orphans(kept: Collection[int], dead_leaders: Collection[int], *, spared: Collection[int] = ()) -> None:
    """Reap adopted children that have ended, and kill those in the session of a dead worker.

    Args:
        spared: leaders that have just ended, whose resource trackers may end by themselves.
        kept: children that are reaped elsewhere.
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
    """Kill and reap every child of the calling process, and their children; returns those left at the deadline."""
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
