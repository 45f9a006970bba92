"""Aborts groups on devices while a thread holds the GIL, so that no Python code runs and no order is received.

The C library reads one byte of a pipe for each communicator, and then calls that communicator's abort, which is C++,
from a thread of its own. The agent writes the bytes when a halt has led to no abort in time. Source: `aio_read` and
`SIGEV_THREAD` of POSIX; the layout is that of glibc and musl on 64-bit machines.
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
_END_S: Seconds = 1.0  # longest wait for the end of reads that have got their byte
_READ = (("descriptor", c_int), ("operation", c_int), ("priority", c_int), ("buffer", c_void_p), ("size", c_size_t))
_EVENT = (("argument", c_void_p), ("signal", c_int), ("notify", c_int), ("function", c_void_p))
_BYTE = ctypes.create_string_buffer(1)
_libc = ctypes.CDLL(None)


class ByteRead(ctypes.Structure):
    """`struct aiocb`, including its `struct sigevent`; the other bytes belong to the library."""

    _fields_ = (*_READ, *_EVENT, ("rest", c_char * 256))


class Bells:
    """The pipe of one process, and a pending read for each communicator that the pipe can abort."""

    def __init__(self) -> None:
        self.show: Callable[[int, int], None] | None = None
        """Shows the agent the pipe, or zeros; None: there is no agent, and no read is prepared."""
        self._pipe: tuple[int, int] | None = None
        self._reads: list[ByteRead] = []

    def add(self, addresses: tuple[int, int] | None) -> Callable[[], None]:
        """Have a C function called with its argument when the bell rings, if possible; returns a way to undo that."""
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
        """In a fork of the communicators' owner: forget the pipe, to which the fork must not write."""
        self._pipe, self._reads, self.show = None, [], None

    def close(self) -> None:
        """Close the pipe once no communicator is left; later communicators get a new pipe."""
        if self._pipe is None:
            return
        (reading, writing), self._pipe = self._pipe, None
        os.write(writing, bytes(len(self._reads)))  # the smallest pipe has room for this and for two rings
        until = time.monotonic() + _END_S
        while any(_libc.aio_error(ctypes.byref(read)) == errno.EINPROGRESS for read in self._reads):
            if time.monotonic() > until:
                return  # a descriptor that is still being read must not be reused for another file
            time.sleep(0.001)
        self._reads = []
        os.close(reading)
        os.close(writing)


BELLS = Bells()
"""The bells of this process."""
hide_from_forks(BELLS)
