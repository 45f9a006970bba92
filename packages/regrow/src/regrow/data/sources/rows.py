"""Files as a `datasets.Dataset`: mapped in place, or copied once per node to the cache folder and mapped there."""

import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from regrow.core.config import cache_home
from regrow.core.errors import DataError, RegrowError, UsageError
from regrow.core.process.extras import install_line
from regrow.data.sources.files import PARQUET, SourceFile, digest_of_files

try:
    import datasets
    import pyarrow as pa
    import pyarrow.parquet as pq
except ImportError as error:
    raise UsageError(
        f"data sets of files need Hugging Face datasets, which cannot be imported: {error}", hint=install_line("data")
    ) from error

_BLOCK = 1 << 24
_ROWS = 4096
_BOM = b"\xef\xbb\xbf"
_LINES = pa.schema({"line": pa.large_binary(), "file": pa.int32(), "at": pa.int64()})
_SMALL = 16
"""A file is mapped in place if reading it allocates less than 1/16 of its size; otherwise it is compressed."""

Tables = Iterator[pa.Table]


def lines_of(files: Sequence[SourceFile], cache_dir: str | os.PathLike[str] | None) -> Any:
    """Every line that is not blank, as `line`, with its location: `file` (counted from 0) and `at` (from 1).

    Raises:
        DataError: a file is damaged, or was changed while it was read.
        UsageError: the cache folder cannot be written.
    """
    return _copied("lines", files, (), _read_lines, cache_dir)


def tables_of(
    files: Sequence[SourceFile], columns: Sequence[str] | None, cache_dir: str | os.PathLike[str] | None
) -> Any:
    """The rows of Parquet or Arrow files.

    Raises:
        DataError: a file is damaged, or was changed while it was read.
        UsageError: a column is not in a file, or the cache folder cannot be written.
    """
    if all(file.is_local and file.suffix not in PARQUET for file in files):
        mapped = [_mapped(file) for file in files]
        if None not in mapped:
            chosen = [_chosen(table, columns, file) for table, file in zip(mapped, files, strict=True)]
            return datasets.Dataset(datasets.table.InMemoryTable(pa.concat_tables(chosen)), fingerprint="mapped")

    def read(number: int, file: SourceFile) -> Tables:
        for batch in _batches(file):
            yield _chosen(batch, columns, file)

    return _copied("tables", files, (columns,), read, cache_dir)


def column_of(files: Sequence[SourceFile], column: str, cache_dir: str | os.PathLike[str] | None) -> Any:
    """One column of Parquet or Arrow files as `value`, with its location as in `lines_of`. Raises as `tables_of`."""

    def read(number: int, file: SourceFile) -> Tables:
        at = 0
        for batch in _batches(file):
            values = _chosen(batch, [column], file).column(0)
            places = {
                "file": pa.array([number] * len(values), pa.int32()),
                "at": pa.array(range(at, at + len(values)), pa.int64()),
            }
            yield pa.table({"value": values, **places})
            at += len(values)

    return _copied("column", files, (column,), read, cache_dir)


def _copied(
    kind: str,
    files: Sequence[SourceFile],
    more: tuple[object, ...],
    read: Callable[[int, SourceFile], Tables],
    cache_dir: str | os.PathLike[str] | None,
) -> Any:
    """The copy of all files. The first process that requests it makes it, while the others wait."""
    folder = Path(cache_dir) if cache_dir is not None else cache_home() / "data"
    try:
        copier = _Copier(cache_dir=str(folder), hash=digest_of_files(kind, files, *more))
        copier.tables = lambda: (table for number, file in enumerate(files) for table in _whole(number, file, read))
        copier.download_and_prepare()
        found = copier.info.splits["train"].num_examples
        return copier.as_dataset("train") if found else datasets.Dataset.from_dict({})
    except OSError as error:
        raise UsageError(
            f"{folder} cannot hold the copy of {files[0].name}: {error.strerror or error}",
            hint="choose another folder by cache_dir=, or XDG_CACHE_HOME",
        ) from error
    except datasets.exceptions.DatasetGenerationError as error:
        cause = error.__cause__
        if isinstance(cause, RegrowError):
            raise cause from None
        if isinstance(cause, OSError):
            raise UsageError(f"{folder} cannot hold the copy: {cause}", hint="make room, or give cache_dir=") from error
        raise DataError(f"{files[0].name} and those beside it cannot be copied: {cause}") from error


class _Copier(datasets.ArrowBasedBuilder):  # type: ignore[misc]
    """Writes tables into one Arrow file of the cache folder, atomically."""

    tables: Callable[[], Tables]

    def _info(self) -> Any:
        return datasets.DatasetInfo()

    def _split_generators(self, _: Any) -> list[Any]:
        return [datasets.SplitGenerator("train")]

    def _generate_tables(self) -> Iterator[tuple[tuple[int, int], pa.Table]]:
        for number, table in enumerate(self.tables()):
            yield (0, number), table


def _whole(number: int, file: SourceFile, read: Callable[[int, SourceFile], Tables]) -> Tables:
    try:
        yield from read(number, file)
    except (pa.ArrowException, OSError, EOFError, zlib.error) as error:
        file.check()
        raise DataError(f"{file.name} cannot be read: {error}", hint="write or fetch it again") from error
    file.check()  # the copy is stored under the digest of this version


def _read_lines(number: int, file: SourceFile) -> Tables:
    at = 0
    yield _LINES.empty_table()
    with file.open(compression="infer") as opened:
        while lines := opened.readlines(_BLOCK):
            if at == 0:
                lines[0] = lines[0].removeprefix(_BOM)
            kept = [place for place, line in enumerate(lines) if line.strip()]
            columns = [[lines[place] for place in kept], [number] * len(kept), [at + place + 1 for place in kept]]
            yield pa.table(dict(zip(_LINES.names, columns, strict=True)), schema=_LINES)
            at += len(lines)


def _batches(file: SourceFile) -> Tables:
    with file.open() as opened:
        if file.suffix in PARQUET:
            parquet = pq.ParquetFile(opened)
            yield parquet.schema_arrow.empty_table()
            for batch in parquet.iter_batches(_ROWS, use_threads=False):
                yield pa.Table.from_batches([batch])
        else:
            yield from _ipc_tables(opened)


def _ipc_tables(source: Any) -> Tables:
    """An empty table, then the record batches of the file format (Feather 2) or the stream format."""
    try:
        reader = pa.ipc.open_file(source)
        batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
    except pa.ArrowInvalid:
        source.seek(0)
        reader = batches = pa.ipc.open_stream(source)
    yield reader.schema.empty_table()
    yield from (pa.Table.from_batches([batch]) for batch in batches)


def _mapped(file: SourceFile) -> pa.Table | None:
    """The table of an Arrow file, mapped; None if it is compressed, as each process would decompress it."""
    before, tables = pa.total_allocated_bytes(), []
    try:
        with pa.memory_map(file.name) as source:
            for table in _ipc_tables(source):
                tables.append(table)
                if pa.total_allocated_bytes() - before > file.size // _SMALL:
                    return None
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{file.name} cannot be read: {error}", hint="write or fetch it again") from error
    return pa.concat_tables(tables)


def _chosen(table: pa.Table, columns: Sequence[str] | None, file: SourceFile) -> pa.Table:
    for column in columns or ():
        if column not in table.column_names:
            raise UsageError(f"{file.name} has no column {column!r}", hint=f"it has {', '.join(table.column_names)}")
    return table if columns is None else table.select(list(columns))
