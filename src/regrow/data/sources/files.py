"""Which files a path, a glob or a URL names, and whether they are still what they were."""

import glob
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

import xxhash

from regrow.core.errors import DataError, UsageError

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

# What a store tells about an object that changes with its content, the surest first.
_VERSIONS = ("ETag", "etag", "md5Hash", "version_id", "mtime", "LastModified", "last_modified", "updated", "created")


@dataclass(frozen=True)
class SourceFile:
    """One file of a data set, as it was when it was found.

    Args:
        name: absolute path, or URL.
        size: bytes.
        version: what changes when the content does: the time of the last change, or an object store's tag.
        options: what fsspec needs to open it (`storage_options`).
    """

    name: str
    size: int
    version: str
    options: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def is_local(self) -> bool:
        """Whether it is a file of this machine's file systems."""
        return "://" not in self.name

    @property
    def is_gzip(self) -> bool:
        """Whether it is compressed, so that it cannot be sought in."""
        return self.name.endswith(".gz")

    @property
    def suffix(self) -> str:
        """The end of its name that tells its kind, without `.gz`; in lower case."""
        return Path(self.name.removesuffix(".gz")).suffix.lower()

    def open(self) -> BinaryIO:
        """Open it to read. Raises `DataError` where it is not there, or no longer the file that was found."""
        self.check()
        if self.is_local:
            return open(self.name, "rb")
        files, path = file_system(self.name, self.options)
        return cast(BinaryIO, files.open(path, "rb"))

    def check(self) -> None:
        """Raises `DataError` where the file is gone or another than when it was found."""
        hint = "files must stay as they are while they are read; start again to read the new ones"
        try:
            now = stat(self.name, self.options)
        except FileNotFoundError as error:
            raise DataError(f"{self.name} is gone since it was opened", hint=hint) from error
        if now.size != self.size:
            raise DataError(f"{self.name} has {now.size} bytes now, but had {self.size} when it was opened", hint=hint)
        if now.version != self.version:
            raise DataError(f"{self.name} was changed since it was opened, its size is the same", hint=hint)


def find_files(paths: Paths, options: Mapping[str, Any] | None = None) -> list[SourceFile]:
    """The files that paths, globs and URLs name: in the order given, those of a glob by name.

    Raises `UsageError` where there are none, where one is missing or a folder, and where a URL cannot be used.
    """
    given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    if not given:
        raise UsageError("no files were given", hint="name at least one path, glob or URL")
    found: list[SourceFile] = []
    for each in given:
        found += _named_by(os.fspath(each), dict(options or {}))
    return found


def _named_by(text: str, options: Mapping[str, Any]) -> list[SourceFile]:
    text = text.removeprefix("file://")
    try:
        found = _found(text, options)
    except FileNotFoundError as error:
        raise UsageError(f"there is no file {error.filename or text}", hint="check the path") from error
    except IsADirectoryError as error:
        raise UsageError(f"{text} is a folder", hint=f"name the files in it, such as {text.rstrip('/')}/*") from error
    except OSError as error:
        raise UsageError(f"{text} cannot be read: {error.strerror or error}") from error
    if not found:
        raise UsageError(f"no file matches {text}", hint="check the path; ** matches any number of folders")
    return found


def _found(text: str, options: Mapping[str, Any]) -> list[SourceFile]:
    if "://" in text:
        return _behind(text, options)
    if os.path.lexists(text) or not glob.has_magic(text):
        return [stat(os.path.abspath(text), options)]
    names = (os.path.abspath(name) for name in glob.glob(text, recursive=True) if not os.path.isdir(name))
    return [stat(name, options) for name in sorted(names)]


def _behind(url: str, options: Mapping[str, Any]) -> list[SourceFile]:
    files, path = file_system(url, options)
    # A web address may have a question mark of its own.
    magic = "*" if url.startswith(("http://", "https://")) else "*?["
    if not any(char in path for char in magic):
        return [stat(url, options)]
    # Asked for one by one: what a listing tells of a file differs, in some stores, from what the file tells.
    names = sorted(str(name).removeprefix("/") for name in files.glob(path))
    return [stat(f"{url.partition('://')[0]}://{name}", options) for name in names]


def stat(name: str, options: Mapping[str, Any]) -> SourceFile:
    """What is there under a path or URL now. Raises `FileNotFoundError`, `IsADirectoryError`, or the store's errors."""
    if "://" not in name:
        status = os.stat(name)
        if os.path.isdir(name):
            raise IsADirectoryError(name)
        return SourceFile(name, status.st_size, str(status.st_mtime_ns), options)
    files, path = file_system(name, options)
    files.invalidate_cache()
    info = files.info(path)
    if info.get("type") == "directory":
        raise IsADirectoryError(name)
    if info.get("size") is None:
        raise UsageError(f"the server of {name} does not tell its size", hint="download the file first")
    version = next((str(info[key]) for key in _VERSIONS if info.get(key)), "")
    return SourceFile(name, int(info["size"]), version, options)


def file_system(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """The fsspec file system of a URL, made in this process, and the path on it. Raises `UsageError`."""
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise UsageError(f"{url} needs fsspec, which is not installed", hint="pip install 'regrow[data]'") from error
    try:
        files, path = url_to_fs(url, **options)
    except (ImportError, ValueError) as error:
        raise UsageError(f"{url} cannot be used: {error}", hint="see fsspec's list of protocols") from error
    return files, str(path)


def digest_of_files(kind: str, files: Iterable[SourceFile], *more: object) -> str:
    """32 hexadecimal digits that change with the names, sizes and versions of the files and with `more`."""
    digest = xxhash.xxh3_128()
    digest.update(repr((kind, [(each.name, each.size, each.version) for each in files], more)).encode())
    return digest.hexdigest()
