"""Writes a job's records. Writing must never stop the job: a full disk loses records, not training."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import msgspec

from regrow.core.config import record_limits
from regrow.core.records import Record
from regrow.core.rotation import RecordLimits, rotate
from regrow.observe.thinning import thin_part

_ENCODER = msgspec.json.Encoder()


class EventWriter:
    """Appends records to a file, one JSON object a line, each with the wall clock as `time`.

    When `write` returns, the file has the whole line or nothing of it, so that a reader may follow it. A full file is
    rotated (`core.rotation`); old parts are thinned to the lines about the job's course, above all incidents.

    Args:
        path: the file; opened by `with`, created if it is missing, readable by its owner only.
        complain: called with a sentence at the first record that cannot be written, and when writing works again.
        limits: size of a full file, and number of full files that are kept whole; None: from the environment.
    """

    def __init__(self, path: Path, *, complain: Callable[[str], None], limits: RecordLimits | None = None) -> None:
        self._path = path
        self._complain = complain
        self._limits = limits or record_limits()
        self._unmovable = False
        self._descriptor = -1
        self._dropped = 0

    def __enter__(self) -> "EventWriter":
        """Open the file. Raises `OSError` if that fails."""
        self._open()
        return self

    def _open(self) -> None:
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file."""
        os.close(self._descriptor)
        self._descriptor = -1

    def write(self, record: Record, at: float | None = None) -> None:
        """Append one record; `at`: wall clock time, default now. Never raises `OSError`."""
        fields: dict[str, object] = msgspec.to_builtins(record)
        fields["time"] = time.time() if at is None else at
        try:
            self._append(_ENCODER.encode(fields) + b"\n")
        except OSError as error:
            self._lost(error)
            return
        if self._dropped:
            self._complain(f"records are written to {self._path} again; {self._dropped} are missing")
            self._dropped = 0
        self._rotate_if_full()

    def _rotate_if_full(self) -> None:
        if self._unmovable or not 0 < self._limits.part <= os.fstat(self._descriptor).st_size:
            return
        try:
            rotate(self._path, self._limits, thin_part)
        except OSError as error:
            self._unmovable = True
            self._complain(f"{self._path} is not kept small: {error.strerror or error}; it grows on")
        if not self._path.exists():
            # If no new file can be made, writing continues to the old one under its new name.
            former = self._descriptor
            try:
                self._open()
            except OSError as error:
                self._complain(f"no new {self._path} can be made: {error.strerror or error}; the old one grows on")
                self._unmovable = True
            else:
                os.close(former)

    def _append(self, line: bytes) -> None:
        written = os.write(self._descriptor, line)
        if written == len(line):
            return
        os.ftruncate(self._descriptor, os.fstat(self._descriptor).st_size - written)
        raise OSError(f"only {written} of {len(line)} bytes fitted")

    def _lost(self, error: OSError) -> None:
        if not self._dropped:
            reason = error.strerror or str(error)
            self._complain(f"records cannot be written to {self._path}: {reason}; the training goes on without them")
        self._dropped += 1
