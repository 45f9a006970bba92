"""Text for a terminal or a pipe that maybe nobody reads: it is kept for a while, and never waited for."""

import contextlib
import os
import select
import stat
import time

from regrow.core.ids import Seconds

KEPT_BYTES = 8 << 20
"""Bytes kept in memory for a reader; more is left out, and that is said."""
_PART_BYTES = 64 << 10


class Shown:
    """Writes to a descriptor without blocking where that can be had: pipes and terminals get an opening of our own.

    Not for several threads at once.

    Args:
        descriptor: standard output or error, which stays as it is: others may have it too.
        keeps: how many bytes wait for a reader.
    """

    def __init__(self, descriptor: int, keeps: int = KEPT_BYTES) -> None:
        self._keeps = keeps
        self._waiting = bytearray()
        self.left_out = 0
        """Bytes that were not read in time."""
        self._descriptor = _opened(descriptor)

    def fileno(self) -> int:
        """The descriptor that is written to."""
        return self._descriptor

    @property
    def waiting(self) -> bool:
        """True if there is text that was not taken yet."""
        return bool(self._waiting)

    def write(self, text: bytes) -> None:
        """Write lines, now or when they are read. Raises `OSError` where nobody will ever read."""
        if len(self._waiting) + len(text) > self._keeps:
            self.left_out += len(text)
            return
        self._waiting += text
        self.flush()

    def flush(self, within: Seconds = 0.0) -> None:
        """Write what waits, as far as it is taken in that time. Raises `OSError` where nobody will ever read."""
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
                self._waiting += f"[{self.left_out} bytes were not shown: nobody read them; logs have them]\n".encode()
                self.left_out = 0

    def close(self) -> None:
        """Let go of the descriptor, not of the one that was given."""
        with contextlib.suppress(OSError):
            os.close(self._descriptor)


def _opened(descriptor: int) -> int:
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISFIFO(mode) or os.isatty(descriptor):
        with contextlib.suppress(OSError):  # another user's terminal, for example: then as everybody writes to it
            # Another opening: whether writing blocks is a property of the opening, and the others have theirs.
            return os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    return os.dup(descriptor)
