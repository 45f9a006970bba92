"""Reading a job's records while they are being written, and after."""

from pathlib import Path

import msgspec

from regrow.core.errors import ProtocolError
from regrow.core.ids import NodeId
from regrow.core.records import SCHEMA, AnyRecord, JobStarted, Record
from regrow.observe.reads import RunRecords

_DECODER: msgspec.json.Decoder[AnyRecord] = msgspec.json.Decoder(AnyRecord, strict=False)
"""Not strict: a loss that is not a number is written as text."""


class RecordTail:
    """Follows `events.jsonl` and `steps.*.jsonl` of one job.

    A line counts once its newline is there; what a writer has not finished, or never will, is left alone.

    Args:
        job_dir: the job's folder; it and its files may appear later.
    """

    def __init__(self, job_dir: Path) -> None:
        self._job_dir = job_dir
        self._offsets: dict[Path, int] = {}
        self.torn: set[Path] = set()
        """Files that end in the middle of a line, as of the last call of `poll`."""

    def poll(self) -> list[Record]:
        """What is new since the last call, in order of `at`. Raises `ProtocolError` for a line that is no record."""
        records: list[Record] = []
        for path in (self._job_dir / "events.jsonl", *sorted(self._job_dir.glob("steps.*.jsonl"))):
            records.extend(self.read(path))
        return sorted(records, key=lambda record: record.at)

    def read(self, path: Path) -> list[AnyRecord]:
        """What is new in one file since the last call."""
        try:
            with path.open("rb") as stream:
                stream.seek(self._offsets.get(path, 0))
                new = stream.read()
        except FileNotFoundError:
            return []
        whole = new[: new.rfind(b"\n") + 1]
        (self.torn.add if len(whole) < len(new) else self.torn.discard)(path)
        start = self._offsets.get(path, 0)
        self._offsets[path] = start + len(whole)
        records = []
        for line in whole.split(b"\n"):
            if line.strip():
                records.append(_decode(line, path, start))
            start += len(line) + 1
        return records


def _decode(line: bytes, path: Path, offset: int) -> AnyRecord:
    try:
        record = _DECODER.decode(line)
    except msgspec.MsgspecError as error:
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
    """All records of a job, in order of `at`; a torn last line of a file is left out. Raises `ProtocolError`."""
    return RecordTail(job_dir).poll()


def read_run(job_dir: Path, name: str, *, live: bool = False) -> RunRecords:
    """All records of a job, with what is known about their files. Raises `ProtocolError`."""
    tail = RecordTail(job_dir)
    records = tail.poll()
    torn = {path.name.removeprefix("steps.").removesuffix(".jsonl") for path in tail.torn}
    return RunRecords(name, records, frozenset(NodeId(node) for node in torn), live)


def read_run_file(path: Path) -> RunRecords:
    """The records of one file. Raises `ProtocolError` for a line that is none, or a file that cannot be read."""
    tail = RecordTail(path.parent)
    try:
        records = tail.read(path)
    except OSError as error:
        raise ProtocolError(f"{path} cannot be read: {error.strerror or error}") from error
    return RunRecords(path.name, sorted(records, key=lambda record: record.at))
