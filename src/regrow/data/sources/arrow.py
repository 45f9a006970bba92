"""Arrow IPC files as a map-style data set."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from regrow.data.sources.blocks import ARROW
from regrow.data.sources.files import Paths
from regrow.data.sources.tables import Tables


class Arrow(Tables):
    """The rows of Arrow IPC files, each a dict by column name. Needs pyarrow.

    Both formats are read: the file format (`.arrow`, `.feather`: Feather 2) and the stream format (also what Hugging
    Face `datasets` writes). Files are mapped, so all processes of a machine share one copy in the page cache. Remote
    ones are copied to the cache folder once. Compressed record batches are decoded where they are read, and of a
    compressed stream all of them stay in memory.

    Args:
        paths: a path, a glob, a URL that fsspec knows, or a list of them; `.arrow`, `.arrows`, `.feather` or `.ipc`.
        transform: what a sample is passed through.
        columns: which to read; None: all.
        cache_dir: the folder for copies; default `$XDG_CACHE_HOME/regrow/data`, `~/.cache` without it.
        storage_options: what fsspec needs to open URLs.
        keep: record batches that each process keeps.

    Raises `UsageError` for files or columns that are missing, files without rows, and where pyarrow is not installed;
    `DataError` for damaged files, and for files that have changed since.
    """

    def __init__(
        self,
        paths: Paths,
        transform: Callable[[dict[str, Any]], Any] | None = None,
        *,
        columns: Sequence[str] | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        keep: int = 16,
    ) -> None:
        super().__init__(
            paths,
            transform,
            suffixes=ARROW,
            columns=columns,
            cache_dir=cache_dir,
            storage_options=storage_options,
            keep=keep,
        )
