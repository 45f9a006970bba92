"""Aborts groups on devices while a thread keeps Python's lock, so that no code of Python runs and no order is heard.

The C library reads one byte of a pipe for each communicator, and then calls that one's abort, which is C++, from a
thread of its own. The agent writes the bytes where a halt has led to no abort in time. Source: `aio_read` and
`SIGEV_THREAD` of POSIX; the layout is that of glibc and musl on machines of 64 bits.
"""

import contextlib
import ctypes
import errno
import os
import time
from collections.abc import Callable
from ctypes import c_char, c_int, c_size_t, c_void_p
from functools import partial

from regrow.core.ids import Seconds
from regrow.core.process.forks import hide_from_forks

_SIGEV_NONE, _SIGEV_THREAD = 1, 2
_END_S: Seconds = 1.0  # for reads to end that were given their byte
_READ = (("descriptor", c_int), ("operation", c_int), ("priority", c_int), ("buffer", c_void_p), ("size", c_size_t))
_EVENT = (("argument", c_void_p), ("signal", c_int), ("notify", c_int), ("function", c_void_p))
_BYTE = ctypes.create_string_buffer(1)
_libc = ctypes.CDLL(None)


class ByteRead(ctypes.Structure):
    """`struct aiocb`, with `struct sigevent` in it; the rest is the library's own."""

    _fields_ = (*_READ, *_EVENT, ("rest", c_char * 256))


class Bells:
    """The pipe of one process, and a read of it for each communicator that is to be aborted so."""

    def __init__(self) -> None:
        self.show: Callable[[int, int], None] | None = None
        """Shows the agent the pipe, or zeros; None: there is no agent, and nothing is prepared."""
        self._pipe: tuple[int, int] | None = None
        self._reads: list[ByteRead] = []

    def add(self, addresses: tuple[int, int] | None) -> Callable[[], None]:
        """Have a function of C called with its argument at the bell, if it can be; returns what prevents it again."""
        with contextlib.suppress(OSError):  # too many files are open
            self._pipe = self._pipe or os.pipe2(os.O_CLOEXEC)
        if self._pipe is None or self.show is None or addresses is None or not hasattr(_libc, "aio_read"):
            return lambda: None
        read = ByteRead(descriptor=self._pipe[0], buffer=ctypes.addressof(_BYTE), size=1, notify=_SIGEV_THREAD)
        read.function, read.argument = addresses
        if _libc.aio_read(ctypes.byref(read)) == 0:
            self._reads.append(read)
            self.show(self._pipe[1], os.fstat(self._pipe[1]).st_ino)
        return partial(self._mute, read)

    def _mute(self, read: ByteRead) -> None:
        read.notify = _SIGEV_NONE
        if self.show is not None and all(each.notify == _SIGEV_NONE for each in self._reads):
            self.show(0, 0)

    def let_go(self) -> None:
        """In a fork of the process whose communicators they are: its pipe is not this process's to write."""
        self._pipe, self._reads, self.show = None, [], None

    def close(self) -> None:
        """Let go of the pipe, when there is no communicator any more: the next ones have another."""
        if self._pipe is None:
            return
        (reading, writing), self._pipe = self._pipe, None
        os.write(writing, bytes(len(self._reads)))  # the smallest pipe holds this and two rings
        until = time.monotonic() + _END_S
        while any(_libc.aio_error(ctypes.byref(read)) == errno.EINPROGRESS for read in self._reads):
            if time.monotonic() > until:
                return  # a number that is still read must not become another file's
            time.sleep(0.001)
        self._reads = []
        os.close(reading)
        os.close(writing)


BELLS = Bells()
"""Those of this process."""
hide_from_forks(BELLS)
