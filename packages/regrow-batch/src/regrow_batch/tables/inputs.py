"""The input of a batch as lines of OpenAI's batch format: such lines, or records that rows are made from."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from regrow.core.errors import UsageError
from regrow_batch.tables.files import Table, is_table, open_unpacked
from regrow_batch.tables.making import Record, RowMaking, fields_of, guessed, row_line

Digest = Callable[[bytes], None]


@dataclass(frozen=True)
class RowLines:
    """A file with a row in each line, which may be gzipped.

    Attributes:
        place: where it is.
    """

    place: str

    unit: ClassVar[str] = "line"

    def description(self) -> dict[str, str]:
        """Settings on which the results depend, beside the bytes."""
        return {}

    def lines(self, digest: Digest) -> Iterator[bytes]:
        """Each line, including blank ones. Raises `UsageError`, `BatchStopped`.

        Args:
            digest: called with all bytes.
        """
        with open_unpacked(self.place) as stream:
            for line in stream:
                digest(line)
                yield line


@dataclass(frozen=True)
class RowRecords:
    """Records that rows are made from. The line number of a record is its number, from 1.

    Attributes:
        place: name of the source for messages.
        making: makes a row from a record.
        read: reads the records from the first one on, in the same order each time.
        table: the source table, whose columns may have types.
    """

    place: str
    making: RowMaking
    read: Callable[[], Iterable[Record]] = field(compare=False)
    table: Table | None = None

    unit: ClassVar[str] = "record"

    def description(self) -> dict[str, str]:
        """Settings on which the results depend, beside the lines, by the names that the user knows."""
        return self.making.description()

    def lines(self, digest: Digest) -> Iterator[bytes]:
        """The row of each record. Raises the errors of reading the records."""
        for number, record in enumerate(self.read()):
            line = row_line(record, number, self.making)
            digest(line)
            yield line


class RowSource(Protocol):
    """Source of a batch: lines with one row each, the same at each reading."""

    @property
    def place(self) -> str:
        """Name of the source."""
        ...

    @property
    def unit(self) -> str:
        """Name of one line, for messages."""
        ...

    def description(self) -> dict[str, str]:
        """Settings on which the results depend, beside the lines, by the names that the user knows."""
        ...

    def lines(self, digest: Digest) -> Iterator[bytes]:
        """Each line, including blank ones."""
        ...


def source_of(place: str, making: RowMaking, *, split: str = "train") -> RowSource:
    """Source of the rows at a place. Raises `UsageError` if nothing is there, or a requested column is missing."""
    if not is_table(place) and not making.asks:
        return RowLines(place)
    table = Table(place, split)
    first = next(iter(table.records()), None)
    if first is None:
        raise UsageError(f"{place} has no record")
    columns = [str(name) for name in first]
    if not making.asks:
        making = guessed(columns, making.url, making.name)
    # Records of JSON may have fields that the first record lacks.
    if is_table(place):
        wanted = {making.prompt, making.messages, making.name, *fields_of(making.template)} - {""}
        if missing := sorted(wanted.difference(columns)):
            raise UsageError(f"{place} has no column {missing[0]!r}", hint=f"it has {', '.join(columns)}")
    return RowRecords(place, making, table.records, table)
