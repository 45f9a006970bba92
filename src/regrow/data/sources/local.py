"""Files that are derived from data files and kept on this machine: made once, whole or not there."""

import fcntl
import gzip
import os
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import xxhash

from regrow.core.config import cache_home
from regrow.core.errors import DataError, DeadlineExceeded, RegrowError
from regrow.core.ids import Seconds
from regrow.data.sources.files import SourceFile

_BLOCK = 1 << 22
_PATIENCE: Seconds = 600.0
_QUIET: Seconds = 5.0

Make = Callable[[BinaryIO], None]


class DerivedFiles:
    """A folder of files, each made from one version of a data file; the one of an earlier version gives way to it.

    However many processes of a machine ask for one at once, one of them makes it and the others wait.

    Args:
        folder: where; None: the user's cache folder (`$XDG_CACHE_HOME/regrow/data`).
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self.folder = Path(folder) if folder is not None else cache_home() / "data"

    def path(self, source: SourceFile, kind: str) -> Path:
        """Where the file of this kind belongs that is made from `source` as it was when it was found."""
        return self.folder / f"{self._stem(source)}-{_hex(f'{source.size} {source.version}')}{kind}"

    def obtain(self, source: SourceFile, kind: str, make: Make, *, whole: Callable[[Path], bool]) -> Path:
        """The file, made if it is not there or not `whole`: `make` gets a new file to write to.

        Raises `OSError` where the folder cannot be written, `DeadlineExceeded` where another process that is making it
        makes no progress, and what `make` raises.
        """
        path = self.path(source, kind)
        if whole(path):
            return path
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._alone(path):
            if not whole(path):
                self._make(path, make)
                for old in self.folder.glob(f"{self._stem(source)}-*{kind}*"):
                    if not old.name.startswith(path.name):
                        old.unlink(missing_ok=True)
        return path

    def _stem(self, source: SourceFile) -> str:
        return _hex(source.name)

    def _make(self, path: Path, make: Make) -> None:
        part = path.with_name(f"{path.name}.part")  # the lock's holder has it alone; a killed one's is overwritten
        try:
            with part.open("wb") as file:
                make(file)
                file.flush()
                os.fsync(file.fileno())
                size = file.tell()
            _seal(path).write_text(str(size))
            part.rename(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise

    @contextmanager
    def _alone(self, path: Path) -> Iterator[None]:
        """Holds a lock that the kernel takes back from a process that dies. The lock's own file stays."""
        part = path.with_name(f"{path.name}.part")
        descriptor = os.open(self.folder / f"{path.name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            seen, deadline = -1, time.monotonic() + _PATIENCE
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    size = part.stat().st_size if part.exists() else 0
                    if size != seen:
                        seen, deadline = size, time.monotonic() + _PATIENCE
                if time.monotonic() > deadline:
                    raise DeadlineExceeded(
                        f"another process has been making {path} for {_PATIENCE:.0f} s without progress",
                        hint="end it, or give another cache_dir",
                    )
                time.sleep(0.02)
            yield
        finally:
            os.close(descriptor)


def _hex(text: str) -> str:
    return xxhash.xxh3_64_hexdigest(text.encode())


def _seal(path: Path) -> Path:
    return path.with_name(f"{path.name}.size")


def is_sealed(path: Path) -> bool:
    """Whether a derived file is there and has the size that it was made with."""
    try:
        return path.stat().st_size == int(_seal(path).read_text())
    except (OSError, ValueError):
        return False


def local_text(source: SourceFile, derived: DerivedFiles) -> Path:
    """A local, uncompressed file with the text of `source`: itself where it is that, else a copy, made once.

    Raises `DataError` where what is compressed is damaged, `RegrowError` where there is no place for the copy.
    """
    if source.is_local and not source.is_gzip:
        return Path(source.name)
    progress = Telling(f"{'unpacking' if source.is_gzip else 'copying'} {source.name}", source.size)

    def make(file: BinaryIO) -> None:
        with source.open() as packed:
            if source.is_gzip:
                _unpack(source, packed, file, progress)
            else:
                _copy(packed, file, packed, progress)
        source.check()  # the copy is kept under the name of this version

    try:
        return derived.obtain(source, ".text", make, whole=is_sealed)
    except OSError as error:
        raise RegrowError(
            f"{source.name} must be copied to {derived.folder} to be read, which failed: {error.strerror or error}",
            hint="make room, or name a folder with cache_dir=",
        ) from error


def _unpack(source: SourceFile, packed: BinaryIO, target: BinaryIO, progress: "Telling") -> None:
    try:
        with gzip.open(packed, "rb") as text:
            _copy(text, target, packed, progress)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{source.name} is no whole gzip file: {error}", hint="fetch it again") from error


def _copy(source: BinaryIO | gzip.GzipFile, target: BinaryIO, packed: BinaryIO, progress: "Telling") -> None:
    while block := source.read(_BLOCK):
        target.write(block)
        progress.at(packed.tell())


class Telling:
    """Lines on standard error about work that takes long; none about work that does not.

    Args:
        what: the work, as in `indexing big.jsonl`.
        total: bytes.
    """

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total = what, total
        self._began = self._told = time.monotonic()

    def at(self, done: int) -> None:
        """So many bytes are done."""
        now = time.monotonic()
        if now - self._told < _QUIET:
            return
        self._told = now
        rate = done / (now - self._began)
        sys.stderr.write(
            f"regrow: {self._what}: {done / 1e9:.2f} of {self._total / 1e9:.2f} GB, {rate / 1e6:.0f} MB/s\n"
        )
        sys.stderr.flush()
