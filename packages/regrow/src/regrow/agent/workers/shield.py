"""Signals that ask for an end and reach all processes of a job at once: a worker leaves them to its agent.

systemd's `KillMode=control-group`, some schedulers and people send SIGTERM to every process of a job. A worker that
this ends takes with it the state that its agent is about to save. So a worker pauses for a moment. If its agent has
received such a signal too, it goes on, and the agent ends it in time; for an agent that is stopped or gets no
processor, the kernel shows that the signal is pending. If not, the signal was for the worker alone and has its usual
effect before the script runs another line. The script sees the dispositions of an ordinary process, and a handler that
it sets itself is called at once. Programs that it executes and processes that it forks have the defaults.
"""

import ctypes
import os
import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from regrow.core.board import Board
from regrow.core.ids import Seconds

_NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_ALONE_S: Seconds = 2.0
"""Time within which the agent must have received the signal too."""
_LOOK_S: Seconds = 0.005
_set, _get = signal.signal, signal.getsignal
_libc = ctypes.CDLL(None)
_libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
_libc.signal.restype = ctypes.c_void_p
_Handler = Callable[[int, FrameType | None], Any] | int | None


class Shield:
    """The shield of one worker. `raise_` must be called in its main thread, before the script.

    Args:
        board: shows the worker if it must stay, and the agent if the script has its own handler for SIGTERM. Without
            one the agent kills a worker that is to end, as the signal would have done.
    """

    def __init__(self, board: Board) -> None:
        self._board, self._pid = board, os.getpid()
        self._deciding = False

    def raise_(self) -> None:
        """Let the default effects of these signals wait for the agent from now on."""
        for number in _NUMBERS:
            _set(number, self._arrived)
        os.register_at_fork(after_in_child=self._drop)
        # Python has no hooks for these two functions.
        signal.signal = self._signal  # type: ignore[assignment]
        signal.getsignal = self._getsignal  # type: ignore[assignment]

    def _drop(self) -> None:
        """Restore the defaults in a process that the script has forked, which is no worker."""
        for number in _NUMBERS:
            if _get(number) == self._arrived:
                _set(number, _default(number))

    def _signal(self, number: int, handler: _Handler) -> _Handler:
        ours = number in _NUMBERS and os.getpid() == self._pid
        default = ours and handler in (signal.SIG_DFL, signal.default_int_handler)
        former = _set(number, self._arrived if default else handler)
        if ours and number == signal.SIGTERM:
            self._board.show_own_end(not default)
        return _default(number) if former == self._arrived else former

    def _getsignal(self, number: int) -> _Handler:
        handler = _get(number)
        return _default(number) if handler == self._arrived else handler

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        """Pause until it is known whether the agent got the signal too; if it did not, the signal takes effect."""
        if self._deciding:
            return
        self._deciding, until = True, time.monotonic() + _ALONE_S
        try:
            while time.monotonic() < until:
                if self._board.must_stay or _waits_for(os.getppid(), number):
                    return
                time.sleep(_LOOK_S)
        finally:
            self._deciding = False
        if number == signal.SIGINT:
            signal.default_int_handler(number, frame)
        _libc.signal(number, None)
        os.kill(self._pid, number)


def _waits_for(pid: int, number: int) -> bool:
    """True if a signal is pending for a process, because the process is stopped or gets no processor."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as status:
            held = [int(line.split()[1], 16) for line in status if line.startswith(("SigPnd:", "ShdPnd:"))]
    except (OSError, ValueError, IndexError):
        return False
    return any(pending >> (number - 1) & 1 for pending in held)


def _default(number: int) -> _Handler:
    return signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
