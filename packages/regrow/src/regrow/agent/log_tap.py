"""Passes workers' lines to the process that applies `--log-rules`, and its answers to the coordinator.

No worker and no agent ever waits for that process: lines that it does not read in time are dropped, with one note.
"""

import asyncio
import contextlib
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable

import msgspec

from regrow.core.config import AgentConfig
from regrow.core.ids import Rank, Seconds, WorkerId
from regrow.core.messages.log_rules import LONGEST_LINE, LogRuleOrder, LogRulesNoted, LogSaid

_MOST_WAITING = 1 << 20
"""Most bytes of lines that wait for the process; further lines are dropped."""
_END_S: Seconds = 1.0
_BLOCK = 1 << 16
_GONE = "the process that applies the log rules has ended, so they are not applied any more"
_log = logging.getLogger("regrow.agent")


class LogTap:
    """Passes the output of a node's workers to the process that applies the rules; without rules it does nothing.

    Args:
        config: configuration of the node, with the rules.
        report: receives the findings, in the event loop.
    """

    def __init__(self, config: AgentConfig, *, report: Callable[[LogSaid], None]) -> None:
        self._node, self._rules, self._report = config.node, config.spec.log_rules, report
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._waiting = bytearray()
        self._partial: dict[WorkerId, dict[int, bytes]] = {}
        """Incomplete last line of each output stream, by worker and stream."""
        self._said = b""
        self._noted: set[str] = set()
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def pid(self) -> int | None:
        """The process that applies the rules; None while there is none."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process if there are rules."""
        if not self._rules:
            return
        self._loop = asyncio.get_running_loop()
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "regrow.health.log_watch"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            self._report(LogRulesNoted(self._node, f"{self._node} cannot apply the log rules: {error}"))
            return
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)
        if process.stdout is not None:
            self._loop.add_reader(process.stdout.fileno(), self._readable, process.stdout.fileno())
        with self._lock:
            self._process = process
            self._waiting += msgspec.json.encode(LogRuleOrder(self._node, self._rules)) + b"\n"
            self._write()

    def close(self) -> None:
        """End the process that applies the rules."""
        with self._lock:
            process, self._process = self._process, None
            if process is not None and process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()
        if process is None:
            return
        if process.stdout is not None:
            if self._loop is not None:
                self._loop.remove_reader(process.stdout.fileno())
            process.stdout.close()
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)

    # --- from the thread that reads the output of workers --------------------------------------------------------

    def began(self, worker: WorkerId, rank: Rank) -> None:
        """Inform the process that a worker has this rank from now on."""
        if self._process is not None:
            self._put([f"{worker}\t{rank}".encode()])

    def feed(self, worker: WorkerId, rank: Rank | None, stream: int, part: bytes) -> None:
        """Pass on `part`, printed by a worker. `rank`: None if it is not shown. `stream`: key of one of its pipes."""
        if self._process is None:
            return
        *lines, rest = part.split(b"\n")
        known = self._partial.setdefault(worker, {})
        begun = known.get(stream, b"")
        if lines:
            lines[0], begun = begun + lines[0], b""
        known[stream] = (begun + rest)[:LONGEST_LINE]
        if rank is None or not lines:
            return
        head = f"{worker}\t{rank}\t".encode()
        self._put([head + line[:LONGEST_LINE].replace(b"\r", b" ") for line in lines if line])

    def ended(self, worker: WorkerId) -> None:
        """Inform the process that a worker's output has ended."""
        if self._process is None:
            return
        self._partial.pop(worker, None)
        self._put([worker.encode()])

    def _put(self, lines: list[bytes]) -> None:
        dropped = False
        with self._lock:
            for line in lines:
                if len(self._waiting) + len(line) < _MOST_WAITING:
                    self._waiting += line + b"\n"
                else:
                    dropped = True
            self._write()
        if dropped:
            self._note("workers print faster than the log rules are applied, so some lines are not looked at")

    def flush(self) -> None:
        """Pass waiting lines on to the process. It must be called regularly."""
        with self._lock:
            self._write()

    def _write(self) -> None:
        process = self._process
        if process is None or process.stdin is None:
            return
        try:
            while self._waiting:
                del self._waiting[: os.write(process.stdin.fileno(), self._waiting[:_BLOCK])]
        except BlockingIOError:
            pass  # The process is busy or stopped.
        except OSError:
            self._waiting.clear()
            self._note(_GONE)

    # --- in the event loop ---------------------------------------------------------------------------------------

    def _readable(self, descriptor: int) -> None:
        try:
            block = os.read(descriptor, _BLOCK)
        except BlockingIOError:
            return
        if not block and self._loop is not None:
            self._loop.remove_reader(descriptor)
            self._note(_GONE)
        *lines, self._said = (self._said + block).split(b"\n")
        for line in lines:
            try:
                self._report(msgspec.json.decode(line, type=LogSaid))
            except msgspec.MsgspecError:
                _log.warning("the process that applies the log rules sent an invalid answer")

    def _note(self, text: str) -> None:
        """Report a note once. May be called from any thread."""
        if text not in self._noted and self._loop is not None:
            self._noted.add(text)
            with contextlib.suppress(RuntimeError):  # The loop may be closed already.
                self._loop.call_soon_threadsafe(self._report, LogRulesNoted(self._node, f"{self._node}: {text}"))
