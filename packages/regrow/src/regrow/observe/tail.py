"""Reads a job's records, also while they are being written."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from regrow.core.errors import ProtocolError
from regrow.core.ids import NodeId, StepNo
from regrow.core.records import SCHEMA, AnyRecord, JobStarted, Record, StepCommitted
from regrow.core.rotation import set_aside
from regrow.observe.reads import RunRecords

_DECODER: msgspec.json.Decoder[AnyRecord] = msgspec.json.Decoder(AnyRecord, strict=False)
"""Decoder of lines; not strict, because a loss of NaN is written as text."""


class _Reached(NamedTuple):
    """Position up to which a file was read: number of the part, its inode, and byte offset in it."""

    part: int = 0
    inode: int = 0
    offset: int = 0


class RecordTail:
    """Follows `events.jsonl` and `steps.*.jsonl` of one job, including rotated parts.

    A line counts once its newline is written; unfinished lines are ignored. So are zero bytes, which a power loss may
    leave in place of text, and the line that they interrupt.

    Args:
        job_dir: the job's folder; it and its files may appear later.
    """

    def __init__(self, job_dir: Path) -> None:
        self._job_dir = job_dir
        self._reached: dict[Path, _Reached] = {}
        self.torn: set[Path] = set()
        """Files that end in the middle of a line, as of the last read, or have zero bytes in place of lines."""
        self._zeroed: set[Path] = set()
        self.cut: set[Path] = set()
        """Files whose first parts were removed before they were read."""

    def poll(self) -> list[Record]:
        """New records since the last call, in order of `at`. Raises `ProtocolError` for an invalid line."""
        records: list[Record] = []
        for path in self.files():
            records.extend(self.read(path))
        return sorted(records, key=lambda record: record.at)

    def files(self) -> list[Path]:
        """Files to follow, also those of which only rotated parts exist."""
        steps = set(self._job_dir.glob("steps.*.jsonl"))
        # Between two parts the file itself may be missing for a moment.
        steps |= {path.with_suffix("") for path in self._job_dir.glob("steps.*.jsonl.*") if path.suffix[1:].isdecimal()}
        return [self._job_dir / "events.jsonl", *sorted(steps)]

    def read(self, path: Path) -> list[AnyRecord]:
        """New records in one file, and in its parts, since the last call."""
        records: list[AnyRecord] = []
        with contextlib.ExitStack() as stack:
            for number, part, stream in _parts(path, self._reached.get(path, _Reached()), stack):
                reached = self._reached.get(path, _Reached())
                if number > reached.part + 1:
                    self.cut.add(path)
                inode = os.fstat(stream.fileno()).st_ino
                if number < reached.part or (number == reached.part and inode != reached.inode):
                    continue  # read already; old parts may have been thinned since
                start = reached.offset if number == reached.part else 0
                stream.seek(start)
                new = stream.read()
                whole = new[: new.rfind(b"\n") + 1]
                self._zeroed |= {path} if b"\0" in new else set()
                torn = len(whole) < len(new) or path in self._zeroed
                (self.torn.add if torn else self.torn.discard)(path)
                self._reached[path] = _Reached(number, inode, start + len(whole))
                for line in whole.split(b"\n"):
                    written = line.rpartition(b"\0")[2]
                    if written.strip():
                        records.append(_decode(written, part, start))
                    start += len(line) + 1
        return records


def _parts(path: Path, reached: _Reached, stack: contextlib.ExitStack) -> Iterator[tuple[int, Path, BinaryIO]]:
    """All parts of a file, opened, oldest first, then the file itself with the number that its part will get."""
    while True:
        itself = _open(path, stack)
        if itself is not None and os.fstat(itself.fileno()).st_ino == reached.inode:
            yield reached.part, path, itself
            return
        parts = set_aside(path)
        newest = _open(parts[-1].path, stack) if parts else None
        if itself is None or newest is None or not os.path.sameopenfile(itself.fileno(), newest.fileno()):
            break
        # The file was rotated between the two calls: a new file is, or will be, in its place.
    for part in parts:
        stream = _open(part.path, stack)
        if stream is not None:
            yield part.number, part.path, stream
    if itself is not None:
        yield (parts[-1].number if parts else 0) + 1, path, itself


def _open(path: Path, stack: contextlib.ExitStack) -> BinaryIO | None:
    try:
        return stack.enter_context(path.open("rb"))
    except FileNotFoundError:
        return None


def _decode(line: bytes, path: Path, offset: int) -> AnyRecord:
    try:
        record = _DECODER.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProtocolError(
            f"{path}, byte {offset}: not a record of this version: {error}",
            hint="read it with the regrow that wrote it, or remove the line",
        ) from error
    if isinstance(record, JobStarted) and record.schema > SCHEMA:
        raise ProtocolError(
            f"{path} has records of version {record.schema}, this regrow reads up to {SCHEMA}",
            hint="read it with the regrow that wrote it",
        )
    return record


def read_records(job_dir: Path) -> list[Record]:
    """All records of a job, in order of `at`, without unfinished last lines. Raises `ProtocolError`."""
    return RecordTail(job_dir).poll()


def read_run(job_dir: Path, name: str, *, live: bool = False) -> RunRecords:
    """All records of a job, with the state of their files. Raises `ProtocolError`."""
    tail = RecordTail(job_dir)
    records, since = [], StepNo(0)
    for path in tail.files():
        found = tail.read(path)
        records += found
        if path in tail.cut:
            since = max(since, next((each.step for each in found if isinstance(each, StepCommitted)), since))
    torn = {path.name.removeprefix("steps.").removesuffix(".jsonl") for path in tail.torn}
    in_order = sorted(records, key=lambda record: record.at)
    return RunRecords(name, in_order, frozenset(NodeId(node) for node in torn), live, since)


def read_run_file(path: Path) -> RunRecords:
    """The records of one file. Raises `ProtocolError` for an invalid line, or an unreadable file."""
    tail = RecordTail(path.parent)
    try:
        records = tail.read(path)
    except OSError as error:
        raise ProtocolError(f"{path} cannot be read: {error.strerror or error}") from error
    return RunRecords(path.name, sorted(records, key=lambda record: record.at))
