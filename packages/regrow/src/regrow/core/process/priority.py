"""Share of the processor that a process gets while other processes want it too."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from regrow.core.ids import Seconds

_T = TypeVar("_T")
_LOWEST = 19
_LOWER = 10
_FIRST_TO_GO = "1000"


def step_back(nice: int) -> None:
    """Lower this process's priority by `nice`; does nothing if that is refused."""
    with contextlib.suppress(OSError):
        os.nice(nice)


def give_way(*, spared: Collection[int] = (), nice: int = _LOWEST) -> None:
    """Let all other processes run before this one's present threads, except `spared`. It cannot be undone."""
    with contextlib.suppress(OSError):
        # Where the kernel groups tasks by session, priorities hold only within a session, and each worker leads one.
        Path("/proc/self/autogroup").write_text(str(nice))
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if int(thread) not in spared:
                least = max(nice, os.getpriority(os.PRIO_PROCESS, int(thread)))
                os.setpriority(os.PRIO_PROCESS, int(thread), least)


def end_soon(used: Seconds) -> None:
    """Lower the priority of a process that is about to exit: slightly now, and to the lowest once it has used `used`.

    It should not slow down other processes. But at the lowest priority from the start, Python's exit, which needs some
    tenths of a second, could take half a minute on busy cores. This call does not end the process.

    Args:
        used: processor time from now, in seconds, after which the priority becomes the lowest.
    """
    give_way(nice=_LOWER)
    until = time.process_time() + used

    def watch() -> None:
        while (left := until - time.process_time()) > 0.0:
            time.sleep(max(left, 0.05))
        give_way()

    try:
        threading.Thread(target=watch, name="regrow-gives-way", daemon=True).start()
    except RuntimeError:  # no more threads are allowed here, so yield fully from the start
        give_way()


def offer_memory() -> None:
    """Have the kernel end this process and those it starts before other processes when memory runs out."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_FIRST_TO_GO)


class PromptThread:
    """A thread that keeps its priority when its process yields to other processes."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(1, "regrow-prompt")
        self.thread: int = self._threads.submit(threading.get_native_id).result()
        """The thread's native id."""

    def run(self, call: Callable[[], _T]) -> _T:
        """Run the call in this thread; returns its result, or raises its exception."""
        return self._threads.submit(call).result()
