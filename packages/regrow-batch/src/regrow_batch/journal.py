"""The journal file: opened by one head at a time, appended to, and turned into the output at the end.

A row counts from the moment its line is written. The file is synced every `SYNC_S`, and before the output is made. A
kill loses unwritten lines, a power failure at most the lines since the last sync; those rows are sent again. The file
is only appended to: a torn last line is ended and skipped.
"""

import errno
import fcntl
import os
from array import array
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Self

from regrow.core.errors import UsageError
from regrow.core.ids import Seconds
from regrow_batch.places import BatchStopped, sync_folder
from regrow_batch.records import JournalHead, changes, decode_head, decode_row, encode_head, encode_row

SYNC_S: Seconds = 1.0
_BLOCK = 1 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT)


class Journal:
    """The results of a job.

    Args:
        path: of the file.
        descriptor: of the open and locked file.
        head: its first line.
    """

    def __init__(self, path: Path, descriptor: int, head: JournalHead) -> None:
        self.path, self.head = path, head
        self._descriptor = descriptor
        self._waiting: list[bytes] = []
        self.torn = 0
        """Number of torn lines that were found."""

    @classmethod
    def open(cls, path: Path, fingerprint: Mapping[str, str]) -> Self:
        """Open the journal of a job, or create it.

        Raises `UsageError` if it belongs to another job, another head has it, or the folder cannot be written, and
        `BatchStopped` if the disk is full.
        """
        try:
            if not path.exists():
                with suppress(FileExistsError):
                    _make(path, (encode_head(fingerprint),), over=False)
            descriptor = _open_and_lock(path)
        except OSError as error:
            if error.errno in _FULL:
                raise _stopped(path, error) from error
            raise UsageError(
                f"the journal {path} cannot be written: {error.strerror}", hint="choose another place with -o"
            ) from error
        try:
            head = _head_of(descriptor, path)
            if differs := changes(head.fingerprint, fingerprint):
                raise UsageError(
                    f"{path} belongs to another job: {'; '.join(differs)}",
                    hint="give the same input and parameters, or another -o, or remove the journal to begin anew",
                )
            journal = cls(path, descriptor, head)
            journal._end_torn_line()
        except BaseException:
            os.close(descriptor)
            raise
        return journal

    def _end_torn_line(self) -> None:
        size = os.fstat(self._descriptor).st_size
        if os.pread(self._descriptor, 1, size - 1) != b"\n":
            self._write(b"\n")

    def append(self, number: int, result: bytes) -> None:
        """Add a row's result; `flush` writes it."""
        self._waiting.append(encode_row(number, result))

    def flush(self) -> None:
        """Write the added results. Raises `BatchStopped`."""
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            self._write(b"".join(waiting))

    def _write(self, data: bytes) -> None:
        try:
            _write_all(self._descriptor, data)
        except OSError as error:
            raise _stopped(self.path, error) from error

    def sync(self) -> None:
        """Make all written lines survive a power failure. Raises `BatchStopped`."""
        try:
            os.fdatasync(self._descriptor)
        except OSError as error:
            raise _stopped(self.path, error) from error

    def rows(self) -> Iterator[tuple[int, int, bytes]]:
        """Each whole row: its number, where its result begins in the file, and the result.

        Reads the open and locked file: its name may belong to another file by now, or to none.
        """
        self.torn = 0
        with os.fdopen(os.dup(self._descriptor), "rb", buffering=_BLOCK) as stream:
            stream.seek(0)
            at = len(stream.readline())
            for line in stream:
                row = decode_row(line[:-1]) if line.endswith(b"\n") else None
                if row is not None:
                    yield row[0], at + len(line) - 1 - len(row[1]), row[1]
                elif line.strip():
                    self.torn += 1
                at += len(line)

    def results(self, rows: int) -> Iterator[tuple[int, bytes]]:
        """The first result of each row with its number, in the input's order. Uses 16 bytes of memory a row.

        Args:
            rows: their number.
        """
        starts, lengths = array("Q", bytes(8 * rows)), array("Q", bytes(8 * rows))
        for number, start, result in self.rows():
            if number < rows and not starts[number]:
                starts[number], lengths[number] = start, len(result)
        for number, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            if start:
                yield number, os.pread(self._descriptor, length, start)

    def end(self, rows: int, unproven: int = 0, *, keep: bool = False, size: int = 0) -> None:
        """Record in the journal that the output is written, and drop the results. Raises `BatchStopped`.

        Args:
            rows: results in the output.
            unproven: error rows among them that are not known to be at fault themselves.
            keep: keep the results, since the output does not contain all of them.
            size: of the output, in bytes; 0: not known.
        """
        kept = (encode_row(number, result) for number, _, result in self.rows()) if keep else ()
        first = encode_head(self.head.fingerprint, rows, unproven, kept=keep, size=size)
        try:
            _make(self.path, chain((first,), kept), over=True)
        except OSError as error:
            raise _stopped(self.path, error) from error

    def begin_anew(self, kept: Iterable[tuple[int, bytes]]) -> None:
        """Atomically replace the journal by one with these results. Raises `BatchStopped`."""
        lines = (encode_row(number, result) for number, result in kept)
        try:
            _make(self.path, chain((encode_head(self.head.fingerprint),), lines), over=True)
            descriptor = _open_and_lock(self.path)
            os.close(self._descriptor)
            self._descriptor = descriptor
        except OSError as error:
            raise _stopped(self.path, error) from error
        self.head = _head_of(self._descriptor, self.path)

    def close(self) -> None:
        """Close the file and release its lock."""
        os.close(self._descriptor)


def _make(path: Path, lines: Iterable[bytes], *, over: bool) -> None:
    """Atomically write a file with these lines; `over`: replace an existing one. Raises `OSError`."""
    new = path.with_name(f"{path.name}.new-{os.getpid()}")
    try:
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            for line in lines:
                _write_all(descriptor, line)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if over:
            new.replace(path)
        else:
            os.link(new, path)
        sync_folder(path.parent)
    finally:
        with suppress(OSError):
            new.unlink(missing_ok=True)


def _write_all(descriptor: int, data: bytes) -> None:
    """Write all bytes. A nearly full disk may take only a part, and report the error at the next call."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _stopped(path: Path, error: OSError) -> BatchStopped:
    return BatchStopped(
        f"the journal {path} cannot be written: {error.strerror}",
        hint="make room, then run the same command again: it goes on from what is written",
    )


def _open_and_lock(path: Path) -> int:
    """Open and lock the file. Raises `OSError`, or `UsageError` if another head has it."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_ino == path.stat().st_ino:
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            raise UsageError(f"another regrow batch works on {path}", hint="let it end, or end it") from None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # the file was replaced between the two calls


def _head_of(descriptor: int, path: Path) -> JournalHead:
    first = os.pread(descriptor, _BLOCK, 0).partition(b"\n")[0]
    head = decode_head(first)
    if head is None:
        raise UsageError(f"{path} is no journal of a batch", hint="choose another -o, or move that file away")
    return head
