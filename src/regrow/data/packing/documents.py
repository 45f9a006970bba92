"""The texts of one piece of the inputs, each with its place for errors."""

import gzip
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from regrow.core.errors import DataError
from regrow.data.packing.parts import Part
from regrow.data.sources.blocks import TableFile
from regrow.data.sources.files import SourceFile
from regrow.data.sources.lines import BOM
from regrow.data.sources.records import kind_of, line_number, malformed, parse_record


@dataclass(frozen=True)
class Document:
    """One text. `done`: bytes of the piece that are read once it is packed; `place`: where it stands, for an error."""

    text: str
    done: int
    place: "Place"


@dataclass(frozen=True)
class Place:
    """Where a document stands: a byte or a row of a file; turned into words only where something is wrong."""

    source: SourceFile
    unit: str
    at: int

    def __str__(self) -> str:
        if self.unit == "row":
            return f"{self.source.name}, row {self.at}"
        if self.unit == "byte":
            with self.source.open() as file:
                return f"{self.source.name}, line {line_number(file, self.at)}"
        return f"{self.source.name}, line {self.at}"


def documents(part: Part, column: str) -> Iterator[Document]:
    """The documents of a piece in order. Raises `DataError` with file and line where one is malformed."""
    if part.is_table:
        return _rows(part, column)
    return _zipped_lines(part, column) if part.source.is_gzip else _lines(part, column)


def _lines(part: Part, column: str) -> Iterator[Document]:
    with part.source.open() as file:
        at = part.begin
        if at:
            # The line at a border belongs to who has its first byte.
            file.seek(at - 1)
            at += len(file.readline()) - 1
        while at < part.end and (line := file.readline()):
            begin, at = at, at + len(line)
            if begin == 0:
                line = line.removeprefix(BOM)
            if line.strip():
                place = Place(part.source, "byte", begin)
                yield Document(_text_of(line, column, place), min(at, part.end) - part.begin, place)
    if at < part.end:
        raise DataError(f"{part.source.name} ended at byte {at} while it was read, {part.source.size} were expected")


def _zipped_lines(part: Part, column: str) -> Iterator[Document]:
    with part.source.open() as packed:
        try:
            with gzip.open(packed, "rb") as file:
                yield from _numbered(file, packed, part, column)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(f"{part.source.name} is no whole gzip file: {error}", hint="fetch it again") from error


def _numbered(file: gzip.GzipFile, packed: BinaryIO, part: Part, column: str) -> Iterator[Document]:
    for number, line in enumerate(file, 1):
        if number == 1:
            line = line.removeprefix(BOM)
        if line.strip():
            place = Place(part.source, "line", number)
            yield Document(_text_of(line, column, place), packed.tell(), place)


def _text_of(line: bytes, column: str, place: Place) -> str:
    try:
        record = parse_record(line)
        return _checked(record, column)
    except ValueError as error:
        if place.unit == "byte":
            with place.source.open() as file:
                number = line_number(file, place.at)
        else:
            number = place.at
        raise malformed(place.source, number, line, str(error)) from error


def _checked(record: dict[str, Any], column: str) -> str:
    if column not in record:
        raise ValueError(f"it has no {column!r}, but {', '.join(map(repr, record)) or 'nothing'}; see --column")
    text = record[column]
    if not isinstance(text, str):
        raise ValueError(f"its {column!r} is {kind_of(text)}, not a string")
    return text


def _rows(part: Part, column: str) -> Iterator[Document]:
    blocks = TableFile(part.source, (column,)).open()
    row, done = sum(blocks.rows[: part.begin]), 0
    for block in range(part.begin, part.end):
        values = blocks.read(block).column(0)
        for inside, scalar in enumerate(values):
            text, place = scalar.as_py(), Place(part.source, "row", row)
            if not isinstance(text, str):
                raise DataError(f"{place}: its {column!r} is {'empty' if text is None else 'no text'}")
            yield Document(text, done + blocks.sizes[block] * (inside + 1) // len(values), place)
            row += 1
        done += blocks.sizes[block]
