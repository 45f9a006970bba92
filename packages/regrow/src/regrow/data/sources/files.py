"""Finds the files of a path, a glob or a URL, and checks that they are unchanged."""

import glob
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

import xxhash

from regrow.core.errors import DataError, UsageError
from regrow.core.process.extras import install_line

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

PARQUET = (".parquet", ".pq")
ARROW = (".arrow", ".feather", ".ipc", ".arrows")
_VERSIONS = ("ETag", "etag", "md5Hash", "version_id", "mtime", "LastModified", "last_modified", "updated", "created")
"""Fields of a store's object that change with its content, the most reliable first."""


@dataclass(frozen=True)
class SourceFile:
    """One file of a data set, in its state when it was found.

    Args:
        name: absolute path, or URL.
        size: size in bytes.
        version: changes with the content: the modification time, or an object store's tag.
        options: fsspec's `storage_options` for the file.
    """

    name: str
    size: int
    version: str
    options: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def is_local(self) -> bool:
        """True if the file is on one of this machine's file systems."""
        return "://" not in self.name

    @property
    def is_table(self) -> bool:
        """True if the suffix is that of a Parquet or Arrow file."""
        return self.suffix in PARQUET + ARROW

    @property
    def suffix(self) -> str:
        """Suffix of the file's name, in lower case."""
        return Path(self.name).suffix.lower()

    def open(self, *, compression: str | None = None) -> BinaryIO:
        """Open the file for reading; `compression="infer"` decompresses it according to its name."""
        import fsspec

        return cast(BinaryIO, fsspec.open(self.name, "rb", compression=compression, **self.options).open())

    def check(self) -> None:
        """Raise `DataError` if the file is gone, or has changed since it was found."""
        hint = "files must stay as they are while they are read; start again to read the new ones"
        try:
            now = _stat(self.name, self.options)
        except FileNotFoundError as error:
            raise DataError(f"{self.name} is gone since it was found", hint=hint) from error
        if now.size != self.size:
            raise DataError(f"{self.name} has {now.size} bytes now, but had {self.size} when it was found", hint=hint)
        if now.version != self.version:
            raise DataError(f"{self.name} was changed since it was found, its size is the same", hint=hint)


def find_files(paths: Paths, options: Mapping[str, Any] | None = None) -> list[SourceFile]:
    """Find the files of paths, globs and URLs, in the order given; those of a glob are sorted by name.

    Raises `UsageError` if there are none, if one is missing or a folder, and if a URL cannot be used.
    """
    given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    if not given:
        raise UsageError("no files were given", hint="name at least one path, glob or URL")
    return [file for each in given for file in _named_by(os.fspath(each).removeprefix("file://"), dict(options or {}))]


def _named_by(text: str, options: Mapping[str, Any]) -> list[SourceFile]:
    try:
        found = [_stat(name, options) for name in _names(text, options)]
    except FileNotFoundError as error:
        raise UsageError(f"there is no file {error.filename or text}", hint="check the path") from error
    except IsADirectoryError as error:
        raise UsageError(f"{text} is a folder", hint=f"name the files in it, such as {text.rstrip('/')}/*") from error
    except OSError as error:
        raise UsageError(f"{text} cannot be read: {error.strerror or error}") from error
    if not found:
        raise UsageError(f"no file matches {text}", hint="check the path; ** matches any number of folders")
    return found


def _names(text: str, options: Mapping[str, Any]) -> list[str]:
    if "://" in text:
        files, path = _file_system(text, options)
        # A web address may have a question mark of its own.
        magic = "*" if text.startswith(("http://", "https://")) else "*?["
        if not any(letter in path for letter in magic):
            return [text]
        return [files.unstrip_protocol(name) for name in sorted(files.glob(path))]
    if os.path.lexists(text) or not glob.has_magic(text):
        return [os.path.abspath(text)]
    return sorted(os.path.abspath(name) for name in glob.glob(text, recursive=True) if not os.path.isdir(name))


def _stat(name: str, options: Mapping[str, Any]) -> SourceFile:
    if "://" not in name:
        status = os.stat(name)
        if os.path.isdir(name):
            raise IsADirectoryError(name)
        return SourceFile(name, status.st_size, str(status.st_mtime_ns), options)
    files, path = _file_system(name, options)
    files.invalidate_cache()
    info = files.info(path)
    if info.get("type") == "directory":
        raise IsADirectoryError(name)
    if info.get("size") is None:
        raise UsageError(f"the server of {name} does not report its size", hint="download the file first")
    version = next((str(info[key]) for key in _VERSIONS if info.get(key)), "")
    return SourceFile(name, int(info["size"]), version, options)


def _file_system(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise UsageError(f"{url} needs fsspec, which is not installed", hint=install_line("data")) from error
    try:
        return cast(tuple[Any, str], url_to_fs(url, **options))
    except (ImportError, ValueError) as error:
        raise UsageError(f"{url} cannot be used: {error}", hint="see fsspec's list of protocols") from error


def digest_of_files(kind: str, files: Iterable[SourceFile], *more: object) -> str:
    """Digest of the names, sizes and versions of the files, and of `more`: 32 hexadecimal digits."""
    reported = repr((kind, [(each.name, each.size, each.version) for each in files], more))
    return xxhash.xxh3_128_hexdigest(reported.encode())
