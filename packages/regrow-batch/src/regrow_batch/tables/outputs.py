"""Writes results to the output: lines of OpenAI's batch format, lines of chosen columns, or Parquet."""

import gzip
from collections.abc import Callable, Iterable, Iterator
from io import BytesIO
from typing import Any, BinaryIO, cast

import msgspec

from regrow.core.errors import UsageError
from regrow.core.process.extras import install_line
from regrow_batch.places import open_to_write, stamp_of
from regrow_batch.tables.columns import FLOATS, RESULTS, TEXT, TEXTS, WHOLE, Column, Kinds, RowResult, as_kind, chosen
from regrow_batch.tables.files import PARQUET, ROWS, Table, suffix_of
from regrow_batch.tables.inputs import RowRecords, RowSource
from regrow_batch.tables.making import EMBEDDINGS, Record, plain, row_line

Numbered = Iterable[tuple[int, bytes]]


def is_parquet(place: str) -> bool:
    """True if an output becomes Parquet."""
    return suffix_of(place) in PARQUET


class Output:
    """The output of a batch. The constructor raises `UsageError` if it cannot be made, before any row is sent.

    Args:
        place: a path or a URL; its suffix decides the format: `.parquet`, or JSON Lines, gzipped if it ends in `.gz`.
        source: the input, whose columns may be kept.
        columns: those selected, as `columns.chosen` reads them; empty: the usual ones.
        embeddings: whether the rows ask for embeddings.
    """

    def __init__(self, place: str, source: RowSource, columns: str = "", *, embeddings: bool = False) -> None:
        self.place, self._source = place, source
        self._before = stamp_of(place)
        self._schema: Any = None
        self._hold: Callable[[int, bytes], None] = lambda *_: None
        self._kinds: Kinds | None = None
        parquet = is_parquet(place)
        self._columns: list[Column] = []
        if not parquet and not columns:
            return
        self._arrow: Any = _pyarrow(place) if parquet else None
        given = self._look(source) if isinstance(source, RowRecords) else []
        self._columns = chosen(columns, given, embeddings=embeddings or _embeds(source))

    @property
    def has_lines(self) -> bool:
        """True if it has the results unchanged, so that a later batch can resume from it."""
        return not is_parquet(self.place) and not self._columns

    def _look(self, source: RowRecords) -> list[str]:
        """The input's columns and their types; for a table without types, inferred by reading it."""
        if self._arrow is not None and isinstance(source.table, Table):
            self._schema = source.table.schema()
        if self._schema is not None and self._is_writable(self._schema, next(iter(source.read()), {})):
            return list(self._schema.names)
        self._schema = None
        self._kinds = Kinds()
        for record in source.read():
            self._kinds.take(record)
        return self._kinds.names

    def _is_writable(self, schema: Any, record: Record) -> bool:
        """True if Parquet can write a record of these types: not all of Arrow's types, nor all Python values."""
        from pyarrow import parquet

        try:
            columns = [self._arrow.array([record.get(each.name)], type=each.type) for each in schema]
            parquet.write_table(self._arrow.table(columns, schema=schema), BytesIO())
        except self._arrow.ArrowException:
            return False
        return True

    def write(
        self, results: Numbered, take: Callable[[bytes], None], hold: Callable[[int, bytes], None] = lambda *_: None
    ) -> int:
        """Write all results, and return their number. Raises `BatchStopped`, `UsageError`.

        Args:
            results: by number, in order.
            take: called with each result.
            hold: called with the number and the line of each record that is read again; raises if it has changed.
        """
        self._hold = hold
        if (found := stamp_of(self.place)) is not None and found != self._before:
            raise UsageError(
                f"{self.place} was written by another since this batch began",
                hint="move it away, then run the same command again: the journal has all results",
            )
        with open_to_write(self.place) as out:
            if is_parquet(self.place):
                return self._write_parquet(self._rows(results, take), out)
            if not self.place.lower().endswith(".gz"):
                return self._write_lines(results, take, out)
            # Without a timestamp, so that the same results make the same file.
            with gzip.GzipFile(fileobj=out, mode="wb", mtime=0, filename="") as packed:
                return self._write_lines(results, take, cast(BinaryIO, packed))

    def _write_lines(self, results: Numbered, take: Callable[[bytes], None], out: BinaryIO) -> int:
        written = 0
        if not self._columns:
            for _, result in results:
                take(result)
                out.write(result)
                out.write(b"\n")
                written += 1
            return written
        for row, record in self._rows(results, take):
            out.write(msgspec.json.encode({each.name: plain(each.value(row, record)) for each in self._columns}))
            out.write(b"\n")
            written += 1
        return written

    def _write_parquet(self, rows: Iterable[tuple[RowResult, Record]], out: BinaryIO) -> int:
        from pyarrow import parquet

        schema, written = self._types(), 0
        with parquet.ParquetWriter(out, schema) as writer:
            for batch in _batches(rows):
                columns = [
                    self._arrow.array(
                        [self._cell(column, *pair) for pair in batch], type=schema.field(column.name).type
                    )
                    for column in self._columns
                ]
                writer.write_table(self._arrow.table(columns, schema=schema))
                written += len(batch)
        return written

    def _cell(self, column: Column, row: RowResult, record: Record) -> Any:
        value = column.value(row, record)
        return as_kind(value, self._kinds.of(column.given)) if column.given and self._kinds is not None else value

    def _types(self) -> Any:
        arrow = self._arrow
        of_kind = {"bool": arrow.bool_(), "int": arrow.int64(), "float": arrow.float64()}
        computed = {TEXT: arrow.string(), WHOLE: arrow.int64(), FLOATS: arrow.list_(arrow.float32())}
        computed[TEXTS] = arrow.list_(arrow.string())
        fields = []
        for column in self._columns:
            if column.computed:
                kind = computed[RESULTS[column.computed][0]]
            elif self._kinds is not None:
                kind = of_kind.get(self._kinds.of(column.given), arrow.string())
            else:
                kind = self._schema.field(column.given).type
            fields.append(arrow.field(column.name, kind))
        return arrow.schema(fields)

    def _rows(self, results: Numbered, take: Callable[[bytes], None]) -> Iterator[tuple[RowResult, Record]]:
        """Each result with the record that it was made from."""
        if not isinstance(self._source, RowRecords) or not any(column.given for column in self._columns):
            for _, result in results:
                take(result)
                yield RowResult.read(result), {}
            return
        records, at = iter(self._source.read()), -1
        record: Record = {}
        for number, result in results:
            while at < number:
                at, record = at + 1, next(records, {})
                self._hold(at, row_line(record, at, self._source.making))
            take(result)
            yield RowResult.read(result), record


def _batches(rows: Iterable[tuple[RowResult, Record]]) -> Iterator[list[tuple[RowResult, Record]]]:
    batch = []
    for row in rows:
        batch.append(row)
        if len(batch) == ROWS:
            yield batch
            batch = []
    if batch:
        yield batch


def _embeds(source: RowSource) -> bool:
    return isinstance(source, RowRecords) and source.making.url == EMBEDDINGS


def _pyarrow(place: str) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UsageError(
            f"{place} needs pyarrow, which is not installed", hint=install_line("tables", package="regrow-batch")
        ) from error
    return pyarrow
