"""Output of workers: kept unchanged in a file for each rank, and shown line by line with the rank in front.

One thread reads it, and another writes to the disk. If the terminal stops taking text, output is kept in memory for a
while, and then only in the files, so that no worker ever blocks in a print.
"""

import contextlib
import logging
import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from regrow.agent.log_tap import LogTap
from regrow.core.background import Background
from regrow.core.ids import Rank, Seconds, WorkerId
from regrow.core.shown import Shown

_READ_BYTES = 64 << 10
_LINE_LIMIT = 16 << 20
_JOINED_BYTES = 1 << 20
"""Most bytes of a standby's output, the newest ones, that are moved to the log of the rank that it takes."""
_UNRANKED_KEPT = 8
"""Number of logs kept of standbys that ended without a rank; older ones are removed."""
_log = logging.getLogger("regrow.agent")


class _Stream(NamedTuple):
    """One of a worker's two pipes, with its unfinished last line."""

    source: int
    target: Shown
    partial: bytearray
    output: "_WorkerOutput"


class _WorkerOutput:
    """The output of one worker. `rank`: None if its output is not shown and its file is called `unranked`."""

    def __init__(self, folder: Path, worker: WorkerId, rank: Rank | None, unranked: str) -> None:
        self._folder = folder
        self.worker = worker
        self.rank = rank
        self._unranked = unranked or f"standby-{worker}"
        self.hushed = False
        self.streams: list[_Stream] = []
        self.held: list[_Stream] = []
        """Streams that are not read yet."""
        self._kept_as = rank
        self._file: int | None = None
        self._in_line = False

    @property
    def prefix(self) -> bytes | None:
        """Prefix of each line that is shown; None if nothing is to be shown."""
        return None if self.rank is None or self.hushed else f"[rank {self.rank}] ".encode()

    # --- the rest runs in the thread that writes to the disk -----------------------------------------------------

    @property
    def unranked(self) -> Path | None:
        """The log of a standby that never had a rank; None for any other worker."""
        return self._path() if self._kept_as is None and self._unranked.startswith("standby-") else None

    def keep(self, text: bytes, *, own_line: bool = False) -> None:
        """Append text to the worker's file."""
        try:
            self._append(b"\n" + text if own_line and self._in_line else text)
        except OSError as error:
            _log.warning("cannot keep the output of worker %s: %s", self.worker, error)

    def _append(self, text: bytes) -> None:
        if self._file is None:
            self._file = os.open(self._path(), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._in_line = not text.endswith(b"\n")
        while text:
            text = text[os.write(self._file, text) :]

    def move(self, rank: Rank) -> None:
        """Append to the file of this rank from now on, after moving its earlier output there."""
        former = None if self._file is None or self._kept_as is not None else self._path()
        self.close()
        self._kept_as = rank
        if former is not None:
            try:
                self._join(former)
            except OSError as error:
                _log.warning("%s cannot be brought to the log of rank %d: %s", former, rank, error)

    def _join(self, former: Path) -> None:
        with former.open("rb") as file:
            file.seek(max(0, former.stat().st_size - _JOINED_BYTES))
            while text := file.read(_READ_BYTES):
                self._append(text)
        former.unlink()

    def _path(self) -> Path:
        return self._folder / (f"{self._unranked}.log" if self._kept_as is None else f"rank{self._kept_as}.log")

    def close(self) -> None:
        """Close the worker's file; `keep` opens it again, or the file of another rank."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
            self._in_line = False


class OutputPump:
    """Reads every worker's output until the worker is finished.

    Args:
        folder: folder of the files.
        forward: True to show the output too.
        shown: descriptors of standard output and standard error, on which it is shown.
        tap: receives the output too.
    """

    def __init__(
        self, folder: Path, *, forward: bool, shown: tuple[int, int] = (1, 2), tap: LogTap | None = None
    ) -> None:
        self._tap = tap
        self._folder = folder
        self._forward = forward
        self._shown = (Shown(shown[0]), Shown(shown[1]))
        self._stuck: set[Shown] = set()
        """Outputs that cannot take more text at the moment."""
        self._disk = Background("regrow-logs")
        self._outputs: dict[WorkerId, _WorkerOutput] = {}
        self._selector = selectors.DefaultSelector()
        self._todo: deque[Callable[[], None]] = deque()
        self._changes: deque[Callable[[], None]] = deque()
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_reader, False)
        os.set_blocking(self._wake_writer, False)
        self._closing = False
        self._unranked_logs: deque[Path] = deque()
        self._thread = threading.Thread(target=self._run, name="regrow-output", daemon=True)

    def start(self) -> None:
        """Start the thread that reads."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._selector.register(self._wake_reader, selectors.EVENT_READ, None)
        self._disk.start()
        self._thread.start()

    def add(
        self, worker: WorkerId, rank: Rank | None, pipes: tuple[int, int], *, unranked: str = "", headed: bool = False
    ) -> None:
        """Take over a worker's pipes of standard output and standard error.

        Args:
            rank: rank of the worker; None: its output is not shown.
            unranked: name of the worker's file while it has no rank, instead of `standby-<worker>`.
            headed: the worker's file begins with the next `head`; its earlier output follows after that.
        """
        self._do(lambda: self._add(_WorkerOutput(self._folder, worker, rank, unranked), pipes, headed=headed))

    def head(self, worker: WorkerId, text: str) -> None:
        """Write a heading of regrow into the worker's file."""
        line = f"=== {time.strftime('%Y-%m-%d %H:%M:%S')} {text} ===\n".encode()
        self._do(lambda: self._head(worker, line))

    def keep(self, worker: WorkerId, text: str) -> None:
        """Write text into the worker's file without showing it."""
        self._do(lambda: self._keep(worker, text.encode(errors="backslashreplace")))

    def place(self, worker: WorkerId, rank: Rank) -> None:
        """Give the worker this rank: all output from now on belongs to the rank."""
        self._change(lambda: self._place(worker, rank))

    def hush(self, worker: WorkerId) -> None:
        """Show nothing of this worker from now on; its further output (stacks) goes only to the file."""
        self._change(lambda: self._hush(worker))

    def finish(self, worker: WorkerId) -> None:
        """Read the rest of a worker's pipes and close them, as the worker has ended."""
        self._do(lambda: self._finish(worker))

    def close(self, *, within: Seconds) -> None:
        """Finish all workers and end the thread; text that cannot be written in that time is dropped."""
        self._do(self._close)
        self._thread.join(within)
        if self._thread.is_alive() or not self._disk.close():
            _log.warning("output of workers was given up: the disk of their logs cannot take it")
        for shown in self._shown:
            with contextlib.suppress(OSError):  # The reader may be gone; the text is in the files.
                shown.flush(within / 4)
            shown.close()

    def _do(self, action: Callable[[], None]) -> None:
        self._todo.append(action)
        with contextlib.suppress(BlockingIOError):  # A full pipe wakes the thread as well.
            os.write(self._wake_writer, b"!")

    def _change(self, action: Callable[[], None]) -> None:
        """Carry out an action before any output is handled that a worker writes after this call."""
        self._changes.append(action)
        self._do(self._make_changes)

    # --- the rest runs in the reading thread ---------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing:
            for key, _ in self._selector.select():
                if isinstance(key.data, _Stream):
                    self._read(key.data)
                elif isinstance(key.data, Shown):
                    self._write_out(key.data, b"")
                else:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake_reader, 4096)
            while self._todo:
                self._todo.popleft()()
        self._selector.close()

    def _make_changes(self) -> None:
        while self._changes:
            self._changes.popleft()()

    def _add(self, output: _WorkerOutput, pipes: tuple[int, int], *, headed: bool) -> None:
        self._outputs[output.worker] = output
        self._begin(output)
        for source, target in zip(pipes, self._shown, strict=True):
            os.set_blocking(source, False)
            stream = _Stream(source, target, bytearray(), output)
            output.streams.append(stream)
            output.held.append(stream)
        if not headed:
            self._take(output)

    def _begin(self, output: _WorkerOutput) -> None:
        if self._tap is not None and output.rank is not None:
            self._tap.began(output.worker, output.rank)

    def _take(self, output: _WorkerOutput) -> None:
        while output.held:
            stream = output.held.pop(0)
            self._selector.register(stream.source, selectors.EVENT_READ, stream)

    def _head(self, worker: WorkerId, line: bytes) -> None:
        if (output := self._outputs.get(worker)) is not None:
            self._write_line(output, line)
            self._take(output)

    def _keep(self, worker: WorkerId, text: bytes) -> None:
        if (output := self._outputs.get(worker)) is not None:
            self._write_file(output, text)

    def _place(self, worker: WorkerId, rank: Rank) -> None:
        output = self._outputs.get(worker)
        if output is None or output.rank == rank:
            return
        line = f"=== {time.strftime('%Y-%m-%d %H:%M:%S')} worker {worker} takes rank {rank} ===\n".encode()
        output.rank = rank
        self._begin(output)
        self._disk.do(partial(output.move, rank))
        self._write_line(output, line)

    def _hush(self, worker: WorkerId) -> None:
        if (output := self._outputs.get(worker)) is not None:
            output.hushed = True

    def _finish(self, worker: WorkerId) -> None:
        output = self._outputs.pop(worker, None)
        if output is None:
            return
        self._take(output)
        for stream in list(output.streams):
            while self._read(stream):
                pass
            self._end(stream)
        if self._tap is not None:
            self._tap.ended(worker)
        self._disk.do(output.close)
        self._disk.do(partial(self._forget_old, output))

    def _forget_old(self, output: _WorkerOutput) -> None:
        """Remove old logs of standbys without a rank. Runs in the thread that writes to the disk."""
        if (path := output.unranked) is None:
            return
        self._unranked_logs.append(path)
        while len(self._unranked_logs) > _UNRANKED_KEPT:
            with contextlib.suppress(OSError):
                self._unranked_logs.popleft().unlink()

    def _close(self) -> None:
        for worker in list(self._outputs):
            self._finish(worker)
        self._closing = True

    def _read(self, stream: _Stream) -> bool:
        """Read one part of a stream; True if there may be more."""
        if stream not in stream.output.streams:
            return False
        try:
            part = os.read(stream.source, _READ_BYTES)
        except BlockingIOError:
            return False
        except OSError as error:
            _log.warning("output of worker %s is lost: %s", stream.output.worker, error)
            part = b""
        if not part:
            self._end(stream)
            return False
        self._make_changes()  # After reading, as the worker may have written this because of an order sent meanwhile.
        self._write_file(stream.output, part)
        self._show(stream, part)
        if self._tap is not None and not stream.output.hushed:
            self._tap.feed(stream.output.worker, stream.output.rank, id(stream), part)
        return True

    def _end(self, stream: _Stream) -> None:
        if stream not in stream.output.streams:
            return
        stream.output.streams.remove(stream)
        self._selector.unregister(stream.source)
        os.close(stream.source)
        if stream.partial:
            self._show(stream, b"\n")

    def _write_line(self, output: _WorkerOutput, line: bytes) -> None:
        self._disk.do(partial(output.keep, line, own_line=True))

    def _write_file(self, output: _WorkerOutput, text: bytes) -> None:
        self._disk.do(partial(output.keep, text))

    def _show(self, stream: _Stream, part: bytes) -> None:
        prefix = stream.output.prefix
        if not self._forward or prefix is None:
            stream.partial.clear()
            return
        end = part.rfind(b"\n") + 1
        if end == 0 and len(stream.partial) + len(part) < _LINE_LIMIT:
            stream.partial.extend(part)
            return
        if end == 0:
            end, part = len(part) + 1, part + b"\n"
        text = bytes(stream.partial) + part[:end]
        stream.partial[:] = part[end:]
        self._write_out(stream.target, b"".join(prefix + line + b"\n" for line in text[:-1].split(b"\n")))

    def _write_out(self, target: Shown, text: bytes) -> None:
        try:
            target.write(text)
        except OSError as error:
            self._forward = False
            _log.warning("the output of workers can no longer be forwarded (%s); files still keep it", error)
        if target.waiting and self._forward and target not in self._stuck:
            self._stuck.add(target)
            self._selector.register(target, selectors.EVENT_WRITE, target)
        elif target in self._stuck and not (target.waiting and self._forward):
            self._stuck.discard(target)
            self._selector.unregister(target)
