"""Files of a batch: on this machine, or behind any URL that fsspec knows."""

import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from regrow.core.errors import RegrowError, UsageError
from regrow.core.process.extras import install_line

if TYPE_CHECKING:
    from collections.abc import Iterator


class BatchStopped(RegrowError):
    """The job cannot go on as things are; what was done is kept, and the same command goes on from there."""


def local_path(place: str) -> Path | None:
    """The path of a place on this machine; None: it is a URL."""
    if place.startswith("file://"):
        return Path(place.removeprefix("file://"))
    return None if "://" in place else Path(place)


def open_to_read(place: str) -> BinaryIO:
    """Open a file or a URL. Raises `UsageError`."""
    path = local_path(place)
    try:
        if path is not None:
            return path.open("rb", buffering=1 << 20)
        return cast(BinaryIO, _fsspec(place).open(place, "rb").open())
    except (OSError, ValueError, ImportError) as error:
        raise UsageError(f"{place} cannot be read: {_reason(error)}") from error


def exists(place: str) -> bool:
    """Whether something is there. Raises `UsageError` where that cannot be found out."""
    path = local_path(place)
    if path is not None:
        return path.exists()
    try:
        files, inner = _fsspec(place).core.url_to_fs(place)
        return bool(files.exists(inner))
    except (OSError, ValueError, ImportError) as error:
        raise UsageError(f"{place} cannot be used: {_reason(error)}") from error


@contextmanager
def open_to_write(place: str) -> "Iterator[BinaryIO]":
    """Write a file that is there as a whole at the end, or not at all. Raises `BatchStopped`."""
    path = local_path(place)
    try:
        if path is None:
            with _fsspec(place).open(place, "wb") as remote:
                yield cast(BinaryIO, remote)
            return
        partial = path.with_name(f"{path.name}.partial")
        try:
            with partial.open("wb", buffering=1 << 20) as stream:
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
            partial.replace(path)
            sync_folder(path.parent)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    except (OSError, ValueError, ImportError) as error:
        raise BatchStopped(
            f"{place} cannot be written: {_reason(error)}", hint="make room, then run the same command again"
        ) from error


def sync_folder(folder: Path) -> None:
    """Let a file's new name outlive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _fsspec(place: str) -> Any:
    try:
        import fsspec
        import fsspec.core
    except ImportError as error:
        raise UsageError(
            f"{place} needs fsspec, which is not installed", hint=install_line("urls", package="regrow-batch")
        ) from error
    return fsspec


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
