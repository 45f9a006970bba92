"""Detection of a worker's death before the kernel has released its memory.

A process counts as ended, and its sockets close, only after its memory was released, which takes some 20 ms for 300 MB
while all others wait. But the kernel releases its locks first. So each worker's main thread holds a robust mutex in the
shared page of its board for life, and a thread of the agent waits for it (`pthread_mutexattr_setrobust` of POSIX;
`futex_exit_release` in Linux). The result is a hint, which is verified with the kernel.
"""

import contextlib
import ctypes
import errno
import mmap
import threading
from collections.abc import Callable

from regrow.agent.workers.processes import prefer_promptness
from regrow.core.board import BOARD_BYTES
from regrow.core.ids import Seconds

_MUTEX_AT = BOARD_BYTES // 2
_FLAG_AT = _MUTEX_AT - 8
_ATTRIBUTES_BYTES = 64
_PROCESS_SHARED = 1
_ROBUST = 1
_END_S: Seconds = 0.05
_libc = ctypes.CDLL(None)


class _Page:
    """The mutex, and the flag that it is held, in a separate mapping."""

    def __init__(self, descriptor: int) -> None:
        self.memory = mmap.mmap(descriptor, BOARD_BYTES)
        self._anchor = ctypes.c_char.from_buffer(self.memory, _MUTEX_AT)
        self.mutex = ctypes.c_void_p(ctypes.addressof(self._anchor))

    def close(self) -> None:
        del self.mutex, self._anchor
        self.memory.close()


def hold(descriptor: int) -> None:
    """Take the mutex in a worker's main thread, until the process ends or executes another program."""
    page = _Page(descriptor)
    if page.memory[_FLAG_AT] == 0 and _libc.pthread_mutex_trylock(page.mutex) == 0:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(page))  # The interpreter's shutdown must not unmap it earlier.
        page.memory[_FLAG_AT] = 1


class EarlyExit:
    """The agent's side of a worker's mutex.

    Args:
        descriptor: the worker's board, before it is passed to the worker.
    """

    def __init__(self, descriptor: int) -> None:
        self._page = _Page(descriptor)
        self._thread: threading.Thread | None = None
        attributes = ctypes.create_string_buffer(_ATTRIBUTES_BYTES)
        usable = (
            _libc.pthread_mutexattr_init(attributes) == 0
            and _libc.pthread_mutexattr_setpshared(attributes, _PROCESS_SHARED) == 0
            and _libc.pthread_mutexattr_setrobust(attributes, _ROBUST) == 0
            and _libc.pthread_mutex_init(self._page.mutex, attributes) == 0
        )
        if not usable:
            self._page.memory[_FLAG_AT] = 2  # Neither the worker nor `listen` uses the mutex then.

    def listen(self, on_end: Callable[[], None]) -> None:
        """If the worker holds the mutex, start a thread that calls `on_end` at its release. Call this repeatedly."""
        if self._thread is None and self._page.memory[_FLAG_AT] == 1:
            thread = threading.Thread(target=self._wait, args=(on_end,), name="regrow-early-exit", daemon=True)
            with contextlib.suppress(RuntimeError):  # No thread can be started now; the pidfd shows the end too.
                thread.start()
                self._thread = thread

    def close(self) -> None:
        """Unmap the page once the thread has ended; leak the page if it has not."""
        if self._thread is not None:
            self._thread.join(_END_S)
            if self._thread.is_alive():
                return  # The thread still uses the page, so leak it; it is small.
        self._page.close()

    def _wait(self, on_end: Callable[[], None]) -> None:
        prefer_promptness()
        if _libc.pthread_mutex_lock(self._page.mutex) == errno.EOWNERDEAD:
            on_end()
