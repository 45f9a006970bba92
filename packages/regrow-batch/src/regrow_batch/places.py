"""Files of a batch: on this machine, or behind any URL that fsspec knows.

Any error there, from whichever library, ends the job in one of two ways. `UsageError` (exit code 2): the user has to
change something, because the place does not exist, credentials are missing or wrong, or a library is not installed.
`BatchStopped` (75): the same command may succeed later, after a lost route, a full disk or an unavailable store.
"""

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BufferedReader, RawIOBase
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TypeVar, cast

from regrow.core.errors import RegrowError, UsageError
from regrow.core.process.extras import install_line

_NOT_LET_IN = frozenset(
    {
        "NoCredentialsError",  # botocore, and adlfs by azure-core's
        "PartialCredentialsError",
        "CredentialRetrievalError",
        "ProfileNotFound",
        "TokenRetrievalError",
        "NoAuthTokenError",
        "DefaultCredentialsError",  # google-auth
        "RefreshError",
        "ClientAuthenticationError",  # azure-core
        "LocalTokenNotFoundError",  # huggingface_hub
        "GatedRepoError",
        "RepositoryNotFoundError",
        "RevisionNotFoundError",
        "EntryNotFoundError",
    }
)
"""Errors of optional libraries, by name, since the libraries may not be installed."""
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "hf": "tables"}
"""By URL scheme: the extra in `pyproject.toml` that installs its libraries."""
_BLOCK = 1 << 20
_Found = TypeVar("_Found")


class BatchStopped(RegrowError):
    """The job cannot go on at present. All results are kept, and the same command resumes."""


class _Taken(BatchStopped):
    """Another process is writing the file."""


def local_path(place: str) -> Path | None:
    """The path of a place on this machine; None: it is a URL."""
    if place.startswith("file://"):
        return Path(place.removeprefix("file://"))
    return None if "://" in place else Path(place)


def partial_of(path: Path) -> Path:
    """Temporary file in which the content of `path` is written until it is complete."""
    return path.with_name(f"{path.name}.partial")


def open_to_read(place: str) -> BinaryIO:
    """Open a file or a URL. Raises `UsageError`, and `BatchStopped` if it cannot be reached; so does reading it."""
    path = local_path(place)
    if path is None:
        opened = reached(place, "read", lambda: _fsspec(place).open(place, "rb").open())
        return cast(BinaryIO, BufferedReader(_Remote(place, opened), _BLOCK))
    try:
        if path.is_fifo() or path.is_char_device():
            # A pipe opened a second time would be empty, or wait for its writer without end.
            raise UsageError(f"{place} is no file, and is read more than once", hint="write it to a file first")
        return path.open("rb", buffering=_BLOCK)
    except (OSError, ValueError) as error:
        raise UsageError(f"{place} cannot be read: {_reason(error)}") from error


def exists(place: str) -> bool:
    """True if something is there. Raises `UsageError`, and `BatchStopped` if it cannot be reached."""
    path = local_path(place)
    if path is not None:
        return path.exists()

    def look() -> bool:
        files, inner = _fsspec(place).core.url_to_fs(place)
        return bool(files.exists(inner))

    return reached(place, "used", look)


def stamp_of(place: str) -> tuple[int, int, int] | None:
    """Mark of a file on this machine that changes when the file is rewritten; None: there is no file."""
    path = local_path(place)
    try:
        found = path.stat() if path is not None else None
    except OSError:
        return None
    return (found.st_ino, found.st_mtime_ns, found.st_size) if found is not None else None


def size_of(place: str) -> int:
    """Bytes of a file on this machine; 0: there is none, or it is behind a URL."""
    path = local_path(place)
    try:
        return path.stat().st_size if path is not None else 0
    except OSError:
        return 0


@contextmanager
def open_to_write(place: str) -> Iterator[BinaryIO]:
    """Write a file that appears complete at the end, or not at all. Raises `BatchStopped`."""
    path = local_path(place)
    if path is None:
        yield from _written_behind_url(place)
        return
    try:
        path = path.resolve()  # keeps a symbolic link, and writes the partial file on the disk of its target
        partial = partial_of(path)
        descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            with os.fdopen(descriptor, "wb", buffering=_BLOCK) as stream:
                _hold_alone(stream, partial)
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
                partial.replace(path)  # still locked, so that no other process can truncate the complete file
            sync_folder(path.parent)
        except _Taken:
            raise
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    except (OSError, ValueError) as error:
        raise BatchStopped(
            f"{place} cannot be written: {_reason(error)}", hint="make room, then run the same command again"
        ) from error


def _hold_alone(stream: BinaryIO, partial: Path) -> None:
    """Lock the partial file and truncate it. Raises `_Taken` if another process writes it, and `OSError`."""
    taken = _Taken(f"{partial} is being written by another process", hint="give each its own -o")
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise taken from None
    except OSError:
        pass  # some file systems have no locks
    if not partial.exists() or not os.path.samestat(os.fstat(stream.fileno()), partial.stat()):
        raise taken  # it was completed and renamed between the two calls
    stream.truncate(0)


def _written_behind_url(place: str) -> Iterator[BinaryIO]:
    """An object appears in its store when the file is closed; if writing fails before, it is discarded."""
    stream = reached(place, "written", lambda: _fsspec(place).open(place, "wb").open(), later=True)
    try:
        yield cast(BinaryIO, _Remote(place, stream))
    except BaseException:
        # Closing the file, or releasing its last reference, would publish the incomplete object.
        with contextlib.suppress(Exception):
            stream.discard()
        stream.closed = True
        raise
    reached(place, "written", stream.close, later=True)


class _Remote(RawIOBase):
    """A file behind a URL that raises this module's errors."""

    def __init__(self, place: str, stream: Any) -> None:
        self._place, self._stream = place, stream

    def readable(self) -> bool:
        return bool(self._stream.readable())

    def writable(self) -> bool:
        return bool(self._stream.writable())

    def seekable(self) -> bool:
        return self.readable() and bool(self._stream.seekable())

    def readinto(self, buffer: Any) -> int:
        data = reached(self._place, "read", lambda: self._stream.read(len(buffer)), later=True)
        buffer[: len(data)] = data
        return len(data)

    def seek(self, offset: int, whence: int = 0) -> int:
        return int(reached(self._place, "read", lambda: self._stream.seek(offset, whence), later=True))

    def report(self) -> int:
        return int(self._stream.tell())

    def write(self, data: Any) -> int:
        reached(self._place, "written", lambda: self._stream.write(data), later=True)
        return len(data)

    def close(self) -> None:
        if not self.closed and self.readable():
            self._stream.close()
        super().close()


def reached(place: str, verb: str, work: Callable[[], _Found], *, later: bool = False) -> _Found:
    """Run an operation on a place behind another library. Raises `UsageError`, or `BatchStopped`.

    Args:
        place: its name for messages.
        verb: the operation as a participle, for messages.
        work: runs it.
        later: the job has begun: any error may be gone at the next start.
    """
    try:
        return work()
    except RegrowError:
        raise
    except Exception as error:  # noqa: BLE001 - `_stop` raises
        # Each store has its own errors, some without a common base: none of them is a defect of this package.
        _stop(place, verb, error, later=later)


def _stop(place: str, verb: str, error: Exception, *, later: bool) -> NoReturn:
    said = f"{place} cannot be {verb}: {_reason(error)}"
    if later:
        raise BatchStopped(said, hint="what is done is kept: run the same command again") from error
    names = {each.__name__ for cause in _causes(error) for each in type(cause).__mro__}
    if names & _NOT_LET_IN or isinstance(error, PermissionError):
        raise UsageError(said, hint="give credentials that may use it") from error
    if isinstance(error, ImportError):
        raise UsageError(said, hint=_extra(place)) from error
    if isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError | ValueError):
        raise UsageError(said) from error
    raise BatchStopped(said, hint="see to the way there, then run the same command again") from error


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An error and its causes."""
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = following.__cause__ or following.__context__


def sync_folder(folder: Path) -> None:
    """Make a renamed file survive a power failure."""
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
        raise UsageError(f"{place} needs fsspec, which is not installed", hint=_extra(place)) from error
    return fsspec


def _extra(place: str) -> str:
    """The command that installs the libraries for a URL."""
    return install_line(_EXTRAS.get(place.partition("://")[0], "urls"), package="regrow-batch")


def _reason(error: Exception) -> str:
    said = (error.strerror if isinstance(error, OSError) else None) or str(error).strip().partition("\n")[0]
    return said or type(error).__name__
