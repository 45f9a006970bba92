"""Parquet as a map-style data set."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from regrow.data.sources.blocks import PARQUET
from regrow.data.sources.files import Paths
from regrow.data.sources.tables import Tables


class Parquet(Tables):
    """The rows of Parquet files, each a dict by column name. Needs pyarrow.

    A row is read with its row group, of which each process keeps the last `keep` decoded ones. Reading in order costs
    each row group once; a shuffled order decodes one a sample unless the file is small or its row groups are: then
    `Arrow`, or `regrow data pack`, is the better form.

    Args:
        paths: a path, a glob, a URL that fsspec knows, or a list of them; `.parquet` or `.pq`.
        transform: what a sample is passed through.
        columns: which to read; None: all.
        storage_options: what fsspec needs to open URLs.
        keep: decoded row groups that each process keeps.

    Raises `UsageError` for files or columns that are missing, files without rows, and where pyarrow is not installed;
    `DataError` for damaged files, and for files that have changed since.
    """

    def __init__(
        self,
        paths: Paths,
        transform: Callable[[dict[str, Any]], Any] | None = None,
        *,
        columns: Sequence[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        keep: int = 4,
    ) -> None:
        super().__init__(
            paths,
            transform,
            suffixes=PARQUET,
            columns=columns,
            cache_dir=None,
            storage_options=storage_options,
            keep=keep,
        )
