"""To learn of a worker's death before the kernel has taken its memory apart.

A process counts as ended, and its sockets close, only when its memory has been given back: some 20 ms for 300 MB, while
everybody else waits for the news. But the locks that it holds are released first. So each worker's main thread holds a
robust mutex in the shared page of its board for life, and a thread of the agent waits for it
(`pthread_mutexattr_setrobust` of POSIX; `futex_exit_release` in Linux). What comes of that is a hint, checked with the
kernel before it is believed.
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
    """The mutex and the flag that says it is held, in a mapping of their own."""

    def __init__(self, descriptor: int) -> None:
        self.memory = mmap.mmap(descriptor, BOARD_BYTES)
        self._anchor = ctypes.c_char.from_buffer(self.memory, _MUTEX_AT)
        self.mutex = ctypes.c_void_p(ctypes.addressof(self._anchor))

    def close(self) -> None:
        del self.mutex, self._anchor
        self.memory.close()


def hold(descriptor: int) -> None:
    """In a worker's main thread: take the mutex, for as long as the process lives or until it executes another."""
    page = _Page(descriptor)
    if page.memory[_FLAG_AT] == 0 and _libc.pthread_mutex_trylock(page.mutex) == 0:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(page))  # the interpreter's own end must not unmap it before ours
        page.memory[_FLAG_AT] = 1


class EarlyExit:
    """The agent's side.

    Args:
        descriptor: the worker's board, before it is handed over.
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
            self._page.memory[_FLAG_AT] = 2  # a worker leaves it alone, and so does `listen`

    def listen(self, on_end: Callable[[], None]) -> None:
        """Once the worker holds the mutex: have a thread call `on_end` when it does so no more. Repeat until then."""
        if self._thread is None and self._page.memory[_FLAG_AT] == 1:
            thread = threading.Thread(target=self._wait, args=(on_end,), name="regrow-pulse", daemon=True)
            with contextlib.suppress(RuntimeError):  # no thread can be had now; its end shows by its pidfd too
                thread.start()
                self._thread = thread

    def close(self) -> None:
        """After the worker's end, which ends the thread: unmap the page."""
        if self._thread is not None:
            self._thread.join(_END_S)
            if self._thread.is_alive():
                return  # it still looks at the page; a page is little
        self._page.close()

    def _wait(self, on_end: Callable[[], None]) -> None:
        prefer_promptness()
        if _libc.pthread_mutex_lock(self._page.mutex) == errno.EOWNERDEAD:
            on_end()
