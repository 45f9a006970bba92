"""The input, read twice: first to count and check its rows, then to send those that remain."""

from array import array
from codecs import BOM_UTF8
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, field

from xxhash import xxh3_64_intdigest, xxh3_128

from regrow.core.errors import UsageError
from regrow_batch.places import BatchStopped
from regrow_batch.rows import BadRow, BatchRow, RowReading, name_of, read_row
from regrow_batch.tables.inputs import RowLines, RowSource
from regrow_batch.tables.making import unmade

OPEN, DONE, NO_ROW = 0, 1, 2
"""States of a row."""
MOST_SHOWN = 20
_BLOCK_ROWS = 512
_BLOCK_BYTES = 4 << 20


@dataclass
class Scan:
    """Contents of an input. Uses nine bytes of memory a row, and eight more during the scan.

    Attributes:
        source: the input.
        digest: of all its bytes.
        size: in bytes.
        states: one of each row.
        lines: a hash of each row.
        malformed, repeated: numbers of lines that are no rows.
        complaints: sentences about the first of them.
    """

    source: RowSource
    digest: str = ""
    size: int = 0
    states: bytearray = field(default_factory=bytearray)
    lines: "array[int]" = field(default_factory=lambda: array("Q"))
    malformed: int = 0
    repeated: int = 0
    complaints: list[str] = field(default_factory=list)

    @property
    def place(self) -> str:
        """Name of the input, for messages."""
        return self.source.place

    @property
    def rows(self) -> int:
        """Number of results to expect."""
        return len(self.states) - self.malformed - self.repeated

    @property
    def done(self) -> int:
        """Number of results that exist."""
        return self.states.count(DONE)

    def complain(self, line: int, what: str) -> None:
        """Keep a sentence about a line, unless there are many already."""
        if len(self.complaints) < MOST_SHOWN:
            self.complaints.append(f"{self.place}, {self.source.unit} {line}: {what}")


def scan(source: RowSource | str) -> Scan:
    """Read all of an input. Raises `UsageError` if it cannot be read, or has no row.

    Args:
        source: the input, or the path or URL of a file with a row in each line.
    """
    found = Scan(RowLines(source) if isinstance(source, str) else source)
    digest, names = xxh3_128(), array("Q")

    def take(line: bytes) -> None:
        digest.update(line)
        found.size += len(line)

    for line_number, line in _whole_lines(found.source.lines(take)):
        try:
            name = name_of(line)
        except ValueError as error:
            found.malformed += 1
            found.states.append(NO_ROW)
            found.lines.append(0)
            names.append(0)
            found.complain(line_number, unmade(line) or str(error))
            continue
        found.states.append(OPEN)
        found.lines.append(xxh3_64_intdigest(line))
        names.append(xxh3_64_intdigest(name.encode()))
    found.digest = digest.hexdigest()
    _leave_out_repeated(found, names)
    if not found.rows:
        first = f": {found.complaints[0]}" if found.complaints else ""
        raise UsageError(
            f"{found.place} has no row{first}",
            hint="each line is a JSON object with a custom_id; or name the column of prompts by --prompt-column",
        )
    return found


def _no_digest(_: bytes) -> None:
    """No digest is needed at the second reading: each line is compared with its hash."""


def _whole_lines(lines: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, with their numbers from 1."""
    for number, line in enumerate(lines, 1):
        stripped = (line.removeprefix(BOM_UTF8) if number == 1 else line).strip()
        if stripped:
            yield number, stripped


def _leave_out_repeated(found: Scan, names: "array[int]") -> None:
    """Keep the first of the rows with the same `custom_id`. Hashes find candidates, the names themselves decide."""
    import numpy

    ordered = numpy.sort(numpy.frombuffer(names, dtype=numpy.uint64))
    same = set(ordered[1:][ordered[1:] == ordered[:-1]].tolist())
    if not same:
        return
    first: dict[str, int] = {}
    for number, (line_number, line) in enumerate(_whole_lines(found.source.lines(_no_digest))):
        if number >= len(found.states) or found.states[number] == NO_ROW or names[number] not in same:
            continue
        hold_to(found, number, line_number, line)
        name = name_of(line)
        before = first.setdefault(name, line_number)
        if before != line_number:
            found.states[number] = NO_ROW
            found.repeated += 1
            unit = found.source.unit
            found.complain(line_number, f"repeats the custom_id {name!r} of {unit} {before}, which counts")


def hold_to(found: Scan, number: int, line_number: int, line: bytes) -> None:
    """Raise `BatchStopped` if a line has changed since the scan: its result would belong to the earlier line."""
    if number >= len(found.states):
        raise BatchStopped(f"{found.place} has grown while it was read", hint="let it be as it was")
    if found.lines[number] not in (0, xxh3_64_intdigest(line)):
        raise BatchStopped(
            f"{found.place} was changed while it was read, at {found.source.unit} {line_number}",
            hint="let it be as it was",
        )


class Feed:
    """The rows that remain, in the input's order.

    Args:
        found: the scan of the input; rows that are done are skipped.
        reading: parameters of reading rows.
    """

    def __init__(self, found: Scan, reading: RowReading) -> None:
        self._found, self._reading = found, reading
        self._stream: Iterator[bytes] | None = None
        self._lines: Iterator[tuple[int, tuple[int, bytes]]] = iter(())

    @property
    def ended(self) -> bool:
        """True if no more rows will come. A file has all of its rows from the start."""
        return True

    def read(self) -> list[BatchRow | BadRow]:
        """The next rows; none at the end. Raises `BatchStopped`, `UsageError`."""
        if self._stream is None:
            self._stream = self._found.source.lines(_no_digest)
            self._lines = enumerate(_whole_lines(self._stream))
        rows: list[BatchRow | BadRow] = []
        taken = 0
        for number, (line_number, line) in self._lines:
            if number < len(self._found.states) and self._found.states[number] != OPEN:
                continue
            hold_to(self._found, number, line_number, line)
            row = read_row(line, number, self._reading)
            if isinstance(row, BadRow):
                where = f"{self._found.place}, {self._found.source.unit} {line_number}"
                row = BadRow(number, row.custom_id, f"{where}: {unmade(line) or row.message}")
            rows.append(row)
            taken += len(line)
            if len(rows) >= _BLOCK_ROWS or taken >= _BLOCK_BYTES:
                break
        return rows

    def close(self) -> None:
        """Close the input."""
        if isinstance(self._stream, Generator):
            self._stream.close()
