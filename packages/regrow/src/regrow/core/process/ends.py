"""Detects the end of an unreaped child process and signals the child, by a pidfd or, if that is refused, without."""

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable

from regrow.core.errors import passes
from regrow.core.ids import Seconds

_LOOK_S: Seconds = 0.02
_WAITING = os.WEXITED | os.WNOWAIT


class ChildEnd:
    """Waits for the end of one child process, in an event loop's thread or beside it.

    Only this process may reap the child: until then its number is not reused, so a signal by number hits no other.

    Args:
        pid: number of the child process.

    Raises `ProcessLookupError` if there is no such process, and `OSError` on a shortage that may pass.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.descriptor: int | None = None
        """A pidfd, which is readable once the child has ended; None if the kernel refuses one."""
        try:
            self.descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            raise
        except OSError as error:
            if passes(error):
                raise

    def signal(self, number: int) -> None:
        """Send a signal to this child only. Raises `ProcessLookupError`."""
        if self.descriptor is not None:
            try:
                signal.pidfd_send_signal(self.descriptor, number)
            except ProcessLookupError:
                raise
            except OSError:  # without pidfds, the older call does the same
                os.kill(self.pid, number)
        else:
            os.kill(self.pid, number)

    def watch(self, on_end: Callable[[], None]) -> None:
        """Without a pidfd, wait in a thread and call `on_end`. Raises `RuntimeError` if no thread can be started."""
        threading.Thread(target=self._wait, args=(on_end,), name="regrow-end", daemon=True).start()

    def _wait(self, on_end: Callable[[], None]) -> None:
        with contextlib.suppress(ChildProcessError):  # the child has ended and was already reaped
            os.waitid(os.P_PID, self.pid, _WAITING)
        on_end()

    def wait(self, within: Seconds) -> bool:
        """Wait for the child's end; True if it ends within this time."""
        if self.descriptor is not None:
            return bool(select.select([self.descriptor], [], [], within)[0])
        until = time.monotonic() + within
        while os.waitid(os.P_PID, self.pid, _WAITING | os.WNOHANG) is None:
            if time.monotonic() > until:
                return False
            time.sleep(_LOOK_S)
        return True

    def close(self) -> None:
        """Close the pidfd."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None
