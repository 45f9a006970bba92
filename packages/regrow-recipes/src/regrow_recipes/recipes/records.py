"""Reads the records of a file, each with its place."""

import csv
import gzip
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

from regrow.core.errors import DataError
from regrow_recipes.recipes.shapes import Record

_SEPARATORS = {".csv": ",", ".tsv": "\t"}


def records(path: str) -> Iterator[tuple[str, Record]]:
    """The records of a file, each with its place. Raises `DataError`.

    Formats: `.parquet`; `.txt`, one record; `.csv` and `.tsv`, whose first line names the columns; `.json` with a list
    of objects; anything else is JSON Lines. All but Parquet may be compressed (`.gz`).
    """
    name = path.removesuffix(".gz")
    suffix = Path(name).suffix.lower()
    if suffix in (".parquet", ".pq"):
        from pyarrow import parquet

        for number, row in enumerate(parquet.read_table(path).to_pylist()):
            yield f"{path}, row {number}", row
        return
    newline = "" if suffix in _SEPARATORS else None
    with (
        Path(path).open("rb") as file,
        io.TextIOWrapper(_unpacked(path, file), encoding="utf-8-sig", newline=newline) as lines,
    ):
        if suffix == ".txt":
            yield path, {"text": lines.read()}
        elif suffix in _SEPARATORS:
            yield from _table(path, lines, _SEPARATORS[suffix])
        elif suffix == ".json":
            yield from _list(path, lines)
        else:
            yield from _json_lines(path, lines)


def _unpacked(path: str, file: IO[bytes]) -> IO[bytes]:
    return cast(IO[bytes], gzip.GzipFile(fileobj=file)) if path.endswith(".gz") else file


def _json_lines(path: str, lines: IO[str]) -> Iterator[tuple[str, Record]]:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield _record(f"{path}, line {number}", line)


def _record(place: str, line: str) -> tuple[str, Record]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{place} is not valid JSON: {error}", hint="write one record per line") from error
    if not isinstance(record, dict):
        raise DataError(
            f"{place} is not an object with keys", hint="write one record per line; a list of records is a .json file"
        )
    return place, record


def _list(path: str, lines: IO[str]) -> Iterator[tuple[str, Record]]:
    """The objects of a JSON list, or of JSON Lines, whatever the file's suffix."""
    text = lines.read()
    if not text.lstrip().startswith("["):
        yield from _json_lines(path, io.StringIO(text))
        return
    try:
        found: Any = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{path} is not valid JSON: {error}") from error
    for number, record in enumerate(found, start=1):
        if not isinstance(record, dict):
            raise DataError(f"{path}, record {number} is not an object with keys: {record!r:.60}")
        yield f"{path}, record {number}", record


def _table(path: str, lines: IO[str], separator: str) -> Iterator[tuple[str, Record]]:
    csv.field_size_limit(sys.maxsize)
    rows = csv.DictReader(lines, delimiter=separator, strict=True)
    try:
        for row in rows:
            place = f"{path}, line {rows.line_num}"
            if None in row or None in row.values():
                raise DataError(f"{place} does not have as many fields as the first line, which names them")
            yield place, row
    except csv.Error as error:
        raise DataError(f"{path}, line {rows.line_num}: {error}") from error
