"""The input of a batch as lines of OpenAI's batch format: such lines, or records that rows are made of."""

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
        """Each line, blank ones too. Raises `UsageError`, `BatchStopped`.

        Args:
            digest: told of all bytes.
        """
        with open_unpacked(self.place) as stream:
            for line in stream:
                digest(line)
                yield line


@dataclass(frozen=True)
class RowRecords:
    """Records that rows are made of; the line of a record has its number, from 1.

    Attributes:
        place: what they are called.
        making: of a row.
        read: reads them from the first on, the same each time.
        table: that they are of, whose columns may have types.
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
        """The row of each record. Raises what reading them does."""
        for number, record in enumerate(self.read()):
            line = row_line(record, number, self.making)
            digest(line)
            yield line


class RowSource(Protocol):
    """Source of a batch: lines that each are a row, the same each time."""

    @property
    def place(self) -> str:
        """Name of the source."""
        ...

    @property
    def unit(self) -> str:
        """Name for one of its lines."""
        ...

    def description(self) -> dict[str, str]:
        """Settings on which the results depend, beside the lines, by the names that the user knows."""
        ...

    def lines(self, digest: Digest) -> Iterator[bytes]:
        """Each line, blank ones too."""
        ...


def source_of(place: str, making: RowMaking, *, split: str = "train") -> RowSource:
    """Source of the rows at a place. Raises `UsageError` if it is not there, or does not say what is asked."""
    if not is_table(place) and not making.asks:
        return RowLines(place)
    table = Table(place, split)
    first = next(iter(table.records()), None)
    if first is None:
        raise UsageError(f"{place} has no record")
    columns = [str(name) for name in first]
    if not making.asks:
        making = guessed(columns, making.url, making.name)
    # Records of JSON may have fields that the first one has not.
    if is_table(place):
        wanted = {making.prompt, making.messages, making.name, *fields_of(making.template)} - {""}
        if missing := sorted(wanted.difference(columns)):
            raise UsageError(f"{place} has no column {missing[0]!r}", hint=f"it has {', '.join(columns)}")
    return RowRecords(place, making, table.records, table)
