"""Files as map-style data sets: `JsonLines`, `Parquet`, `Arrow`."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.utils.data import Dataset

from regrow.core.errors import UsageError
from regrow.data.sources.files import ARROW, PARQUET, Paths, SourceFile, digest_of_files, find_files
from regrow.data.sources.records import malformed, parse_record

Transform = Callable[[dict[str, Any]], Any]


class FileRows(Dataset[Any]):
    """The rows of files by number, each a dict, in the order of the files. Can be pickled and forked.

    Args:
        files: from `find_files`.
        transform: function applied to each sample; None: none.
        columns: columns to read; None: all.
        cache_dir: folder for copies; None: `$XDG_CACHE_HOME/regrow/data`, by default below `~/.cache`.
    """

    def __init__(
        self,
        files: list[SourceFile],
        transform: Transform | None,
        columns: Sequence[str] | None,
        cache_dir: str | os.PathLike[str] | None,
    ) -> None:
        self.transform = transform
        self._files, self._columns, self._cache_dir = files, columns, cache_dir
        self._rows = self._open()
        if len(self) == 0:
            names = ", ".join(file.name for file in files[:3]) + (f" and {len(files) - 3} more" * (len(files) > 3))
            raise UsageError(f"no rows in {names}", hint="look where they come from")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        record = self._record(self._rows[int(index)])
        return record if self.transform is None else self.transform(record)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_rows"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._rows = self._open()

    def fingerprint(self) -> str:
        """Digest of the names, sizes and modification times of the files. It does not include the transform."""
        return digest_of_files(type(self).__name__, self._files, self._columns)

    def _open(self) -> Any:
        from regrow.data.sources.rows import tables_of

        return tables_of(self._files, self._columns, self._cache_dir)

    def _record(self, row: dict[str, Any]) -> dict[str, Any]:
        return row


class JsonLines(FileRows):
    """The lines of JSON Lines files, each a dict; blank lines are skipped.

    Sample i is the i-th line of all files, in the order given (those of a glob sorted by name). A line is parsed when
    it is read. The lines are copied to the cache folder once per node, uncompressed, and mapped by all processes.

    Args:
        paths: a path, a glob, a URL that fsspec supports (`s3://…`, `memory://…`), or a list of them; also compressed.
        transform: function applied to each sample; None: none.
        cache_dir: folder for copies; default `$XDG_CACHE_HOME/regrow/data`, by default below `~/.cache`.
        storage_options: fsspec's options for URLs.

    Raises `UsageError` for files that are missing or have no lines; `DataError`, with file and line, when a line is
    read that is not a JSON object.
    """

    def __init__(
        self,
        paths: Paths,
        transform: Transform | None = None,
        *,
        cache_dir: str | os.PathLike[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(find_files(paths, storage_options), transform, None, cache_dir)

    def _open(self) -> Any:
        from regrow.data.sources.rows import lines_of

        return lines_of(self._files, self._cache_dir)

    def _record(self, row: dict[str, Any]) -> dict[str, Any]:
        try:
            return parse_record(row["line"])
        except ValueError as error:
            raise malformed(self._files[row["file"]].name, row["at"], row["line"], str(error)) from error


class _Tables(FileRows):
    suffixes: tuple[str, ...] = ()

    def __init__(
        self,
        paths: Paths,
        transform: Transform | None = None,
        *,
        columns: Sequence[str] | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        files = find_files(paths, storage_options)
        for file in files:
            if file.suffix not in self.suffixes:
                raise UsageError(f"{file.name} is none of {', '.join(self.suffixes)}", hint="check the path")
        super().__init__(files, transform, columns, cache_dir)


class Parquet(_Tables):
    """The rows of Parquet files, each a dict by column name.

    They are copied to the cache folder once per node, uncompressed, and mapped by all processes for fast random access.

    Args:
        paths: a path, a glob, a URL that fsspec supports, or a list of them; `.parquet` or `.pq`.
        transform: function applied to each sample; None: none.
        columns: columns to read; None: all.
        cache_dir: folder for copies; default `$XDG_CACHE_HOME/regrow/data`, by default below `~/.cache`.
        storage_options: fsspec's options for URLs.

    Raises `UsageError` for files or columns that are missing, and files without rows; `DataError` for damaged files.
    """

    suffixes = PARQUET


class Arrow(_Tables):
    """The rows of Arrow IPC files, each a dict by column name.

    Both formats are supported: the file format (`.arrow`, `.feather`: Feather 2) and the stream format (which Hugging
    Face `datasets` writes). Local files are mapped in place, so all processes share one copy in the page cache;
    compressed and remote files are copied to the cache folder once per node, uncompressed.

    Args:
        paths: a path, a glob, a URL that fsspec supports, or a list of them; `.arrow`, `.arrows`, `.feather` or `.ipc`.
        transform: function applied to each sample; None: none.
        columns: columns to read; None: all.
        cache_dir: folder for copies; default `$XDG_CACHE_HOME/regrow/data`, by default below `~/.cache`.
        storage_options: fsspec's options for URLs.

    Raises `UsageError` for files or columns that are missing, and files without rows; `DataError` for damaged files.
    """

    suffixes = ARROW
