"""A launcher's output for people, and the signals by which they interrupt it."""

import asyncio
import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable

from regrow.core import records
from regrow.core.ids import Seconds
from regrow.core.messages import facts
from regrow.core.records import (
    CheckpointSaved,
    IncidentClosed,
    NodeJudged,
    NodeQuarantined,
    Noted,
    Record,
    ReplacementJudged,
    ReplicaCorrupted,
    ReplicasDiverged,
    ScaleRefused,
)
from regrow.core.shown import Shown
from regrow.core.verdicts import Severity
from regrow.observe.story import describe, mended

_LAST_WORDS_S: Seconds = 2.0
_ECHO_S: Seconds = 5.0
"""The same signal again within this time is the same request: the group got it, and a parent forwarded it too."""
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_REASONS = {signal.SIGINT: "interrupted by Ctrl-C", signal.SIGHUP: "the terminal was closed"}


class Console:
    """Prints to standard error, from any thread; never blocks on a slow reader, and needs none.

    Args:
        quiet: print only what is necessary (`--quiet`).
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._deaf = self._proven = False
        self._lock = threading.Lock()
        self._shown: Shown | None = None
        self.unkept: list[IncidentClosed] = []
        """Incidents after which some ranks no longer have their own values."""

    @property
    def to_terminal(self) -> bool:
        """True if standard error is a terminal."""
        try:
            return sys.stderr is not None and sys.stderr.isatty()
        except ValueError:  # it is closed
            return False

    def note(self, text: str) -> None:
        """Print a line that `--quiet` suppresses."""
        if not self._quiet:
            self.say(text)

    def say(self, text: str) -> None:
        """Print a line, also with `--quiet`."""
        with self._lock:
            if self._deaf:
                return
            try:
                self._write(f"regrow: {text}\n")
            except OSError:
                self._deaf = True

    def _write(self, line: str) -> None:
        if sys.stderr is not sys.__stderr__ or sys.__stderr__ is None:
            sys.stderr.write(line)
            sys.stderr.flush()
            return
        if self._shown is None:
            sys.__stderr__.flush()
            self._shown = Shown(sys.__stderr__.fileno())
        self._shown.write(line.encode(errors="backslashreplace"))

    def close(self) -> None:
        """Write what is left, and wait at most `_LAST_WORDS_S` for the reader."""
        with self._lock, contextlib.suppress(OSError):
            if self._shown is not None:
                self._shown.flush(_LAST_WORDS_S)
                self._shown.close()
                self._shown = None

    def record(self, item: Record | facts.NodeProgress) -> None:
        """Print a line for a record that is of interest while a job runs."""
        match item:
            case IncidentClosed():
                self.note(mended(item))
                self.unkept += [item] if item.not_kept else []
            case CheckpointSaved():
                size = f"{item.nbytes / 1e6:.1f} MB in {item.seconds:.1f} s"
                self.note(f"state@{item.step} is in {item.folder}: {size}, beside the training")
            case ScaleRefused():
                self.note(f"{item.reason}; the job goes on as it is")
            case NodeJudged(severity=Severity.LEAVE | Severity.FATAL) if (text := describe(item)) is not None:
                self.say(text)
            case NodeJudged(occasion=records.IN_TRAINING) if (text := describe(item)) is not None:
                self.note(text)
            case ReplacementJudged(reason=""):
                if not self._proven:
                    self.note(f"{describe(item)} (the last proof: `regrow status`)")
                self._proven = True
            case ReplacementJudged() | ReplicaCorrupted() | ReplicasDiverged() | NodeQuarantined() if (
                text := describe(item)
            ) is not None:
                self.say(text)
            case Noted():
                self.note(item.text)
            case _:
                pass


class Interruptions:
    """Signals that ask this process to end: the first asks the job to stop, a second Ctrl-C ends everything at once.

    Any other signal that is repeated soon is the same request: Slurm's `linuxproc` signals a launcher and its parent.

    Args:
        ask: called once, with the reason in words and the signal.
        force: called for a later SIGINT, and with a `notice` for any later one of the signals.
        notice: a further signal, which only announces the end of this node.
    """

    def __init__(
        self,
        ask: Callable[[str, signal.Signals], None],
        force: Callable[[], None],
        *,
        notice: signal.Signals | None = None,
    ) -> None:
        self._ask = ask
        self._force = force
        self._signals = _STOP_SIGNALS if notice is None else (*_STOP_SIGNALS, notice)
        self._forcing = (signal.SIGINT,) if notice is None else self._signals
        self._asked: tuple[signal.Signals, float] | None = None
        self.last = False
        """True if nothing runs in this process after the job; signals at exit then leave the job's exit code alone."""

    def __enter__(self) -> "Interruptions":
        """Install the handlers; a signal that is ignored (`nohup`) stays ignored."""
        loop = asyncio.get_running_loop()
        for number in self._signals:
            if signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, self._arrived, number)
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Restore the default handlers; if `last`, restore only that of Ctrl-C, and ignore the other signals."""
        loop = asyncio.get_running_loop()
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)
        for number in self._signals:
            if loop.remove_signal_handler(number) and self.last and number != signal.SIGINT:
                signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def _arrived(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if self._asked is None:
            self._asked = number, now
            self._ask(_REASONS.get(number, f"{number.name} was received"), number)
        elif number == signal.SIGINT or (
            number in self._forcing and (number != self._asked[0] or now > self._asked[1] + _ECHO_S)
        ):
            self._force()
