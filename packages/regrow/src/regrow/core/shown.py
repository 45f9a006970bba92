"""Output to a terminal or pipe that may have no reader: text is kept for a while, but nothing waits for a reader."""

import contextlib
import os
import select
import stat
import time

from regrow.core.ids import Seconds

KEPT_BYTES = 8 << 20
"""Bytes kept in memory for a reader; further text is left out, and the output says so."""
_PART_BYTES = 64 << 10


class Shown:
    """Writes to a descriptor, if possible without blocking: a pipe or terminal is opened a second time for that.

    Not for use by several threads at once.

    Args:
        descriptor: standard output or error; it stays unchanged, since other processes may share it.
        keeps: number of bytes that may wait for a reader.
    """

    def __init__(self, descriptor: int, keeps: int = KEPT_BYTES) -> None:
        self._keeps = keeps
        self._waiting = bytearray()
        self.left_out = 0
        """Number of bytes that were dropped because no reader took them in time."""
        self._descriptor = _opened(descriptor)

    def fileno(self) -> int:
        """The descriptor that is written to."""
        return self._descriptor

    @property
    def waiting(self) -> bool:
        """True if some text is not written yet."""
        return bool(self._waiting)

    def write(self, text: bytes) -> None:
        """Write lines, now or when there is a reader. Raises `OSError` if there will never be a reader."""
        if len(self._waiting) + len(text) > self._keeps:
            self.left_out += len(text)
            return
        self._waiting += text
        self.flush()

    def flush(self, within: Seconds = 0.0) -> None:
        """Write waiting text, as far as it is read within this time. Raises `OSError` if no reader can come."""
        deadline = time.monotonic() + within
        while self._waiting:
            try:
                written = os.write(self._descriptor, self._waiting[:_PART_BYTES])
            except BlockingIOError:
                left = deadline - time.monotonic()
                if left <= 0:
                    return
                select.select([], [self._descriptor], [], left)
                continue
            del self._waiting[:written]
            if self.left_out and not self._waiting:
                self._waiting += f"[{self.left_out} bytes were not shown: not read in time; logs have them]\n".encode()
                self.left_out = 0

    def close(self) -> None:
        """Close the descriptor that this object has opened, not the one that was passed to it."""
        with contextlib.suppress(OSError):
            os.close(self._descriptor)


def _opened(descriptor: int) -> int:
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISFIFO(mode) or os.isatty(descriptor):
        with contextlib.suppress(OSError):  # another user's terminal, for example: writes may then block
            # Blocking is a property of an open file description: this one is new, and the other writers keep theirs.
            return os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    return os.dup(descriptor)
