"""Where durable checkpoints are kept: a folder of a file system, or a URL that fsspec knows (`s3://`, `gs://`, `memory://`).

Both have the same few operations; what an object store cannot do, rename and sync, is no part of them.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

from regrow.core.errors import UsageError
from regrow.core.ids import StepNo
from regrow.core.process.extras import install_line
from regrow.hydration.durable.layout import MANIFEST, MARK, folder_of, step_of

_UNFINISHED = ".unfinished-"


class CheckpointStorage(Protocol):
    """Holds one folder a checkpoint. All operations raise `OSError`; those of a URL may raise what its store raises."""

    url: str

    def working(self, step: StepNo, attempt: int) -> str:
        """The name of the folder in which a checkpoint is made."""
        ...

    def begin(self, folder: str) -> None:
        """Make a working folder, or find it there. Until `publish` it counts as torn."""
        ...

    def publish(self, folder: str, step: StepNo) -> str:
        """The manifest is there: give the folder its name, which is returned."""
        ...

    def folders(self) -> list[str]:
        """The names of all checkpoints, torn ones included, unfinished ones not."""
        ...

    def remains(self) -> list[str]:
        """The folders that are surely ours and will never be complete, if no other writer is at work."""
        ...

    def sizes(self, folder: str) -> dict[str, int]:
        """The files of a folder and their bytes; none where there is no such folder."""
        ...

    def read(self, folder: str, name: str) -> AbstractContextManager[BinaryIO]:
        """A file to read from, at any position."""
        ...

    def write(self, folder: str, name: str) -> AbstractContextManager[BinaryIO]:
        """A new file, which is there in full once the block has ended without an error."""
        ...

    def delete(self, folder: str, name: str) -> None:
        """Remove a file, if it is there."""
        ...

    def remove(self, folder: str) -> None:
        """Remove a folder so that it never looks complete on the way, and is known as ours until it is gone."""
        ...

    def address(self, folder: str) -> str:
        """The folder for people."""
        ...


def place(url: str) -> CheckpointStorage:
    """The place that a path or a URL names. Raises `UsageError` where its kind of store cannot be used here."""
    if "://" not in url:
        return FolderStorage(Path(url))
    if url.startswith("file://"):
        return FolderStorage(Path(url.removeprefix("file://")))
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise UsageError(f"{url} needs fsspec, which is not installed", hint=install_line("data")) from error
    try:
        files, root = url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise UsageError(f"{url} cannot be used: {error}", hint="see fsspec's list of protocols") from error
    return UrlStorage(url, files, root)


class FolderStorage:
    """A folder of a file system; if there are several nodes, one that they share.

    Args:
        directory: made when it is needed.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.url = str(directory)

    def working(self, step: StepNo, attempt: int) -> str:
        """A name that no finished checkpoint has."""
        return f"{_UNFINISHED}{step}-{attempt}"

    def begin(self, folder: str) -> None:
        """Make it, and what is above it."""
        (self._directory / folder).mkdir(parents=True, exist_ok=True)

    def publish(self, folder: str, step: StepNo) -> str:
        """Rename it."""
        final, replaced = folder_of(step), f"{_UNFINISHED}{step}-replaced"
        _sync(self._directory / folder)
        if (self._directory / final).exists():
            self._discard(replaced)
            (self._directory / final).rename(self._directory / replaced)
        (self._directory / folder).rename(self._directory / final)
        _sync(self._directory)
        self._discard(replaced)
        return final

    def folders(self) -> list[str]:
        """All that are named as checkpoints."""
        return [name for name in self._names() if step_of(name) is not None]

    def remains(self) -> list[str]:
        """What has the name of an unfinished one."""
        return [name for name in self._names() if name.startswith(_UNFINISHED)]

    def _names(self) -> list[str]:
        return os.listdir(self._directory) if self._directory.is_dir() else []

    def sizes(self, folder: str) -> dict[str, int]:
        """By looking into the folder."""
        path = self._directory / folder
        return {each.name: each.stat().st_size for each in path.iterdir()} if path.is_dir() else {}

    @contextmanager
    def read(self, folder: str, name: str) -> Iterator[BinaryIO]:
        """The file itself."""
        with (self._directory / folder / name).open("rb") as file:
            yield file

    @contextmanager
    def write(self, folder: str, name: str) -> Iterator[BinaryIO]:
        """The file itself, on the disk and not just in its cache when the block ends."""
        with (self._directory / folder / name).open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())

    def delete(self, folder: str, name: str) -> None:
        """Unlink."""
        (self._directory / folder / name).unlink(missing_ok=True)

    def remove(self, folder: str) -> None:
        """Take its name away, then what it holds."""
        path = self._directory / folder
        if not folder.startswith(_UNFINISHED) and path.exists():
            folder = f"{_UNFINISHED}{folder}"
            self._discard(folder)
            path.rename(self._directory / folder)
        self._discard(folder)

    def _discard(self, folder: str) -> None:
        shutil.rmtree(self._directory / folder, ignore_errors=True)

    def address(self, folder: str) -> str:
        """Its path."""
        return str(self._directory / folder)


class UrlStorage:
    """A place behind fsspec. A folder is worked on under its own name and has a file that says so until it is whole.

    Args:
        url: as the user wrote it.
        files: fsspec's file system.
        root: the URL's path on it.
    """

    def __init__(self, url: str, files: Any, root: str) -> None:
        self.url = url.rstrip("/")
        self._files, self._root = files, root.rstrip("/")

    def working(self, step: StepNo, attempt: int) -> str:
        """The final name: it cannot be changed later."""
        return folder_of(step)

    def begin(self, folder: str) -> None:
        """Mark it as unfinished, and only then as no longer complete, if an earlier job had completed it."""
        self._files.makedirs(self._path(folder), exist_ok=True)
        if MARK not in self.sizes(folder):
            with self.write(folder, MARK) as file:
                file.write(b"This checkpoint is being written, or its writer was killed.\n")
        self.delete(folder, MANIFEST)

    def publish(self, folder: str, step: StepNo) -> str:
        """Take the mark away. The manifest is what counts."""
        self.delete(folder, MARK)
        return folder

    def folders(self) -> list[str]:
        """All that are named as checkpoints."""
        with contextlib.suppress(FileNotFoundError):
            self._files.invalidate_cache()
            found = self._files.ls(f"{self._root}/", detail=False)
            names = [str(each).rstrip("/").rpartition("/")[2] for each in found]
            return [name for name in names if step_of(name) is not None]
        return []

    def remains(self) -> list[str]:
        """What still has the mark, and no manifest."""
        sizes = {folder: self.sizes(folder) for folder in self.folders()}
        return [folder for folder, files in sizes.items() if MARK in files and MANIFEST not in files]

    def sizes(self, folder: str) -> dict[str, int]:
        """By asking the store."""
        with contextlib.suppress(FileNotFoundError):
            self._files.invalidate_cache()
            found = self._files.ls(f"{self._path(folder)}/", detail=True)
            return {str(each["name"]).rpartition("/")[2]: each["size"] for each in found if each["type"] == "file"}
        return {}

    def read(self, folder: str, name: str) -> AbstractContextManager[BinaryIO]:
        """In blocks, read as they are needed."""
        return cast(AbstractContextManager[BinaryIO], self._files.open(self._path(folder, name), "rb"))

    @contextmanager
    def write(self, folder: str, name: str) -> Iterator[BinaryIO]:
        """Uploaded in parts, visible when the block ends without an error."""
        file = self._files.open(self._path(folder, name), "wb")
        try:
            yield file
        except BaseException:
            with contextlib.suppress(AttributeError, NotImplementedError):  # not every store can take it back
                file.discard()
            raise
        file.close()

    def delete(self, folder: str, name: str) -> None:
        """Remove the object."""
        with contextlib.suppress(FileNotFoundError):
            self._files.rm_file(self._path(folder, name))

    def remove(self, folder: str) -> None:
        """Mark it, take its manifest, then the rest, then the mark."""
        names = self.sizes(folder)
        self.begin(folder)
        for name in names:
            if name != MARK:
                self.delete(folder, name)
        self.delete(folder, MARK)
        with contextlib.suppress(OSError, NotImplementedError):  # where folders exist without files in them
            self._files.rmdir(self._path(folder))

    def address(self, folder: str) -> str:
        """Its URL."""
        return f"{self.url}/{folder}"

    def _path(self, *names: str) -> str:
        return "/".join((self._root, *names))


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
