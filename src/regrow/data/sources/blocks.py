"""Tables in files: the row groups of Parquet, the record batches of Arrow's IPC formats. Needs pyarrow, not torch."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from regrow.core.errors import DataError, UsageError
from regrow.data.sources.files import SourceFile
from regrow.data.sources.local import DerivedFiles, local_text


class Blocks(Protocol):
    """One open file of tables, of this process."""

    columns: list[str]

    @property
    def rows(self) -> Sequence[int]:
        """Rows of each block."""
        ...

    @property
    def sizes(self) -> Sequence[int]:
        """Bytes of each block, as far as the file tells."""
        ...

    def read(self, block: int) -> Any:
        """A block as a `pyarrow.Table`. Raises `DataError` where the file is damaged or another by now."""
        ...


@dataclass(frozen=True)
class TableFile:
    """One file of tables, to be opened where it is read.

    Args:
        source: the file.
        columns: the columns wanted, in this order; None: all.
        local: the folder of local copies, for Arrow files behind URLs.
    """

    source: SourceFile
    columns: tuple[str, ...] | None
    local: str | None = None

    def open(self) -> Blocks:
        """Open it. Raises `DataError` where it is damaged, `UsageError` where a column is not in it."""
        self.source.check()
        blocks: Blocks = ParquetBlocks(self) if self.source.suffix in PARQUET else ArrowBlocks(self)
        for column in self.columns or ():
            if column not in blocks.columns:
                raise UsageError(
                    f"{self.source.name} has no column {column!r}", hint=f"it has {', '.join(blocks.columns)}"
                )
        return blocks


PARQUET = (".parquet", ".pq")
ARROW = (".arrow", ".feather", ".ipc", ".arrows")


class ParquetBlocks:
    """A Parquet file by row groups; of a remote one only what is wanted is read."""

    def __init__(self, file: TableFile) -> None:
        pyarrow("Parquet files")
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._file = file
        opened: str | BinaryIO = file.source.name if file.source.is_local else file.source.open()
        try:
            # Not mapped: a file that shrinks while it is mapped would end the process.
            self._parquet = pq.ParquetFile(opened, memory_map=False, pre_buffer=not file.source.is_local)
        except (pa.ArrowException, OSError) as error:
            raise _damaged(file.source, "Parquet", error) from error
        metadata = self._parquet.metadata
        groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
        self.columns = list(self._parquet.schema_arrow.names)
        self.rows = [group.num_rows for group in groups]
        self.sizes = [group.total_byte_size for group in groups]

    def read(self, block: int) -> Any:
        """One row group. Without threads of pyarrow's: loader workers are forked, and are many already."""
        import pyarrow as pa

        columns = None if self._file.columns is None else list(self._file.columns)
        try:
            return self._parquet.read_row_group(block, columns=columns, use_threads=False)
        except (pa.ArrowException, OSError) as error:
            self._file.source.check()
            raise _damaged(self._file.source, f"Parquet (row group {block})", error) from error


class ArrowBlocks:
    """An Arrow IPC file in the file format (Feather 2) or the stream format, mapped into memory."""

    def __init__(self, file: TableFile) -> None:
        pa = pyarrow("Arrow files")

        self._file = file
        self._path = _local_copy(file)
        self._size = os.stat(self._path).st_size
        self._batches: list[Any] | None = None
        try:
            self._mapped = pa.memory_map(str(self._path)) if self._size else pa.BufferReader(b"")
            try:
                self._reader = pa.ipc.open_file(self._mapped)
            except pa.ArrowInvalid:
                self._mapped.seek(0)
                self._reader = pa.ipc.open_stream(self._mapped)
                self._batches = list(self._reader)
        except (pa.ArrowException, OSError) as error:
            raise _damaged(file.source, "Arrow", error) from error
        schema = self._reader.schema
        self.columns = list(schema.names)
        wanted = [schema.get_field_index(name) for name in file.columns or () if name in self.columns]
        if wanted and self._batches is None:
            self._reader = self._of_columns(wanted)

    @cached_property
    def rows(self) -> list[int]:
        """Rows of each record batch. Of compressed ones a column is decoded for it."""
        if self._batches is not None:
            return [batch.num_rows for batch in self._batches]
        if not self.columns:
            return []
        narrow = [place for place, field in enumerate(self._reader.schema) if _is_narrow(field.type)]
        name = self._reader.schema.names[narrow[0] if narrow else 0]
        reader = self._of_columns([self.columns.index(name)])
        return [reader.get_batch(block).num_rows for block in range(reader.num_record_batches)]

    @property
    def sizes(self) -> list[int]:
        """Bytes of each record batch in the file, as if all rows had the same size."""
        rows = self.rows
        return [self._size * count // max(1, sum(rows)) for count in rows]

    def _of_columns(self, places: list[int]) -> Any:
        import pyarrow as pa

        options = pa.ipc.IpcReadOptions(included_fields=sorted(places), use_threads=False)
        return pa.ipc.open_file(self._mapped, options=options)

    def read(self, block: int) -> Any:
        """One record batch."""
        import pyarrow as pa

        now = os.stat(self._path).st_size
        if now < self._size:  # reading on would end the process with SIGBUS
            raise DataError(
                f"{self._path} has {now} bytes now, but had {self._size} when it was opened",
                hint="files must stay as they are while they are read",
            )
        try:
            batch = self._reader.get_batch(block) if self._batches is None else self._batches[block]
            table = pa.Table.from_batches([batch])
        except (pa.ArrowException, OSError) as error:
            raise _damaged(self._file.source, f"Arrow (record batch {block})", error) from error
        return table if self._file.columns is None else table.select(list(self._file.columns))


def _is_narrow(kind: Any) -> bool:
    from pyarrow import types

    return bool(types.is_primitive(kind))


def _local_copy(file: TableFile) -> Path:
    if file.source.is_local:
        return Path(file.source.name)
    return local_text(file.source, DerivedFiles(file.local))


def pyarrow(what: str) -> Any:
    """The module. Raises `UsageError` where it is not installed."""
    try:
        import pyarrow as pa
        import pyarrow.ipc
    except ImportError as error:
        raise UsageError(f"{what} need pyarrow, which is not installed", hint="pip install 'regrow[data]'") from error
    return pa


def _damaged(source: SourceFile, kind: str, error: Exception) -> DataError:
    return DataError(f"{source.name} cannot be read as {kind}: {error}", hint="write or fetch it again")
