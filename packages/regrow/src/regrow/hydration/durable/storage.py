"""Storage of durable checkpoints: a folder of a file system, or a URL of fsspec (`s3://`, `gs://`, `memory://`).

Both have the same few operations; rename and sync are not among them, since an object store lacks them.
"""

import contextlib
import errno
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

from regrow.core.errors import UsageError
from regrow.core.ids import StepNo
from regrow.core.messages.lineage import NOBODY, Lineage
from regrow.core.process.extras import install_line
from regrow.hydration.durable.names import (
    MANIFEST,
    MARK,
    UNFINISHED,
    folder_of,
    head_of,
    lineage_of_remains,
    step_of,
    unfinished,
)

_MARKED = re.compile(r"lineage ([0-9a-f]*)")


class CheckpointStorage(Protocol):
    """A place with a folder for each checkpoint. All methods raise `OSError`; those of a URL also its store's."""

    url: str
    own: Lineage
    """The training that uses the place: files of others are never changed."""

    def working(self, step: StepNo, attempt: int) -> str:
        """The name of the folder in which a checkpoint is made."""
        ...

    def begin(self, folder: str) -> None:
        """Make a working folder, unless it exists. Until `publish` it counts as torn."""
        ...

    def publish(self, folder: str, step: StepNo) -> str:
        """Give the folder its final name, once it has its manifest; returns that name."""
        ...

    def folders(self) -> list[str]:
        """The names of all checkpoints, including torn ones but not unfinished ones."""
        ...

    def taken(self, folder: str) -> bool:
        """True if a folder of that name exists."""
        ...

    def remains(self) -> dict[str, str]:
        """Folders that will never be complete unless another writer is at work on them, each with its owner."""
        ...

    def sizes(self, folder: str) -> dict[str, int]:
        """The files of a folder with their sizes in bytes; empty if there is no such folder."""
        ...

    def read(self, folder: str, name: str) -> AbstractContextManager[BinaryIO]:
        """Open a file for reading at any position."""
        ...

    def write(self, folder: str, name: str) -> AbstractContextManager[BinaryIO]:
        """Open a new file, which is complete once the block has ended without an error."""
        ...

    def delete(self, folder: str, name: str) -> None:
        """Remove a file, if it exists."""
        ...

    def remove(self, folder: str) -> None:
        """Remove a folder so that it never looks complete meanwhile, and is recognized as regrow's until it is gone."""
        ...

    def address(self, folder: str) -> str:
        """Address of the folder, for people."""
        ...


def place(url: str, own: Lineage = NOBODY) -> CheckpointStorage:
    """The storage that a path or a URL names. Raises `UsageError` if that kind of store cannot be used here.

    Args:
        url: path or URL of the place.
        own: the training that uses it.
    """
    if (folder := folder_at(url)) is not None:
        return FolderStorage(folder, own)
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise UsageError(f"{url} needs fsspec, which is not installed", hint=install_line("data")) from error
    try:
        files, root = url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise UsageError(f"{url} cannot be used: {error}", hint="see fsspec's list of protocols") from error
    return UrlStorage(url, files, root, own)


def folder_at(url: str) -> Path | None:
    """The folder of a file system that a path or a URL names; None if it names something else."""
    if url.startswith("file://"):
        return Path(url.removeprefix("file://"))
    return None if "://" in url else Path(url)


def owner(at: CheckpointStorage, folder: str) -> str | None:
    """Id of the training that owns this checkpoint, complete or torn; None if it is not known."""
    with contextlib.suppress(Exception), at.read(folder, MANIFEST) as file:  # after any error the owner is not known
        return head_of(file.read()).lineage.id
    with contextlib.suppress(Exception), at.read(folder, MARK) as file:
        found = _MARKED.search(file.read().decode(errors="replace"))
        return found.group(1) if found else ""
    return None


def _name_for(at: CheckpointStorage, step: StepNo) -> str:
    """The name for a new checkpoint: one that is free, or that this training already has."""
    name = folder_of(step)
    if not at.own.id or not at.taken(name):
        return name
    theirs = owner(at, name)
    return name if theirs is not None and at.own.owns(theirs) else folder_of(step, at.own.id)


class FolderStorage:
    """A folder of a file system, which all nodes share if there are several.

    Args:
        directory: the folder; made when it is needed.
        own: the training that uses it.
    """

    def __init__(self, directory: Path, own: Lineage = NOBODY) -> None:
        self._directory = directory
        self.url, self.own = str(directory), own

    def working(self, step: StepNo, attempt: int) -> str:
        """A working name that no finished checkpoint has."""
        return unfinished(self.own.id, f"{step}-{attempt}")

    def begin(self, folder: str) -> None:
        """Make the folder and its parents."""
        (self._directory / folder).mkdir(parents=True, exist_ok=True)

    def publish(self, folder: str, step: StepNo) -> str:
        """Rename the folder."""
        final, replaced = _name_for(self, step), unfinished(self.own.id, f"{step}-replaced")
        _sync(self._directory / folder)
        if (self._directory / final).exists():
            self._discard(replaced)
            (self._directory / final).rename(self._directory / replaced)
        (self._directory / folder).rename(self._directory / final)
        _sync(self._directory)
        self._discard(replaced)
        return final

    def folders(self) -> list[str]:
        """All folders that are named as checkpoints."""
        return [name for name in self._names() if step_of(name) is not None]

    def taken(self, folder: str) -> bool:
        """True if the name exists, even as a file or a dangling link."""
        return os.path.lexists(self._directory / folder)

    def remains(self) -> dict[str, str]:
        """Folders with the name of an unfinished checkpoint."""
        found = {name: lineage_of_remains(name) for name in self._names()}
        return {name: whose for name, whose in found.items() if whose is not None}

    def _names(self) -> list[str]:
        return os.listdir(self._directory) if self._directory.is_dir() else []

    def sizes(self, folder: str) -> dict[str, int]:
        """Sizes of the files, from the directory."""
        path = self._directory / folder
        return {each.name: each.stat().st_size for each in path.iterdir()} if path.is_dir() else {}

    @contextmanager
    def read(self, folder: str, name: str) -> Iterator[BinaryIO]:
        """Open the file without blocking, since opening a pipe in its place would never return."""
        path = self._directory / folder / name
        with open(path, "rb", opener=_without_waiting) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError(errno.EINVAL, "it is no file", str(path))
            yield file

    @contextmanager
    def write(self, folder: str, name: str) -> Iterator[BinaryIO]:
        """Write to the file, which is synced to the disk when the block ends."""
        with (self._directory / folder / name).open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())

    def delete(self, folder: str, name: str) -> None:
        """Unlink the file."""
        (self._directory / folder / name).unlink(missing_ok=True)

    def remove(self, folder: str) -> None:
        """Rename the folder as unfinished, then delete its contents."""
        path = self._directory / folder
        if not folder.startswith(UNFINISHED) and os.path.lexists(path):
            folder = unfinished(self.own.id, folder)
            self._discard(folder)
            path.rename(self._directory / folder)
        self._discard(folder)

    def _discard(self, folder: str) -> None:
        path = self._directory / folder
        if path.is_symlink():
            path.unlink(missing_ok=True)
        else:
            shutil.rmtree(path, ignore_errors=True)

    def address(self, folder: str) -> str:
        """Path of the folder."""
        return str(self._directory / folder)


class UrlStorage:
    """A place behind fsspec. A folder has its final name at once, and a file that marks it as unfinished.

    Args:
        url: as the user wrote it.
        files: fsspec's file system.
        root: the URL's path on it.
        own: the training that uses it.
    """

    def __init__(self, url: str, files: Any, root: str, own: Lineage = NOBODY) -> None:
        self.url, self.own = url.rstrip("/"), own
        self._files, self._root = files, root.rstrip("/")

    def working(self, step: StepNo, attempt: int) -> str:
        """The final name, because it cannot be changed later."""
        return _name_for(self, step)

    def begin(self, folder: str) -> None:
        """Mark the folder as unfinished, and only then remove the manifest, if an earlier job had completed it."""
        self._files.makedirs(self._path(folder), exist_ok=True)
        if MARK not in self.sizes(folder):
            with self.write(folder, MARK) as file:
                file.write(b"This checkpoint is being written, or its writer was killed.\n")
                file.write(b"lineage %b\n" % self.own.id.encode())
        self.delete(folder, MANIFEST)

    def publish(self, folder: str, step: StepNo) -> str:
        """Remove the mark. The manifest alone makes the checkpoint complete."""
        self.delete(folder, MARK)
        return folder

    def folders(self) -> list[str]:
        """All folders that are named as checkpoints."""
        with contextlib.suppress(FileNotFoundError):
            self._files.invalidate_cache()
            found = self._files.ls(f"{self._root}/", detail=False)
            names = [str(each).rstrip("/").rpartition("/")[2] for each in found]
            return [name for name in names if step_of(name) is not None]
        return []

    def taken(self, folder: str) -> bool:
        """True if the folder contains any file."""
        return bool(self.sizes(folder))

    def remains(self) -> dict[str, str]:
        """Folders that still have the mark, and no manifest."""
        sizes = {folder: self.sizes(folder) for folder in self.folders()}
        torn = [folder for folder, files in sizes.items() if MARK in files and MANIFEST not in files]
        return {folder: whose for folder in torn if (whose := owner(self, folder)) is not None}

    def sizes(self, folder: str) -> dict[str, int]:
        """Sizes of the files, as the store reports them."""
        with contextlib.suppress(FileNotFoundError):
            self._files.invalidate_cache()
            found = self._files.ls(f"{self._path(folder)}/", detail=True)
            return {str(each["name"]).rpartition("/")[2]: each["size"] for each in found if each["type"] == "file"}
        return {}

    def read(self, folder: str, name: str) -> AbstractContextManager[BinaryIO]:
        """Open the object; blocks are read as they are needed."""
        return cast(AbstractContextManager[BinaryIO], self._files.open(self._path(folder, name), "rb"))

    @contextmanager
    def write(self, folder: str, name: str) -> Iterator[BinaryIO]:
        """Upload in parts; the object is visible when the block ends without an error."""
        file = self._files.open(self._path(folder, name), "wb")
        try:
            yield file
        except BaseException:
            with contextlib.suppress(AttributeError, NotImplementedError):  # not every store can discard an upload
                file.discard()
            raise
        file.close()

    def delete(self, folder: str, name: str) -> None:
        """Remove the object."""
        with contextlib.suppress(FileNotFoundError):
            self._files.rm_file(self._path(folder, name))

    def remove(self, folder: str) -> None:
        """Mark the folder, then delete its manifest, the other files, and at last the mark."""
        names = self.sizes(folder)
        self.begin(folder)
        for name in names:
            if name != MARK:
                self.delete(folder, name)
        self.delete(folder, MARK)
        with contextlib.suppress(OSError, NotImplementedError):  # some stores keep folders without files
            self._files.rmdir(self._path(folder))

    def address(self, folder: str) -> str:
        """URL of the folder."""
        return f"{self.url}/{folder}"

    def _path(self, *names: str) -> str:
        return "/".join((self._root, *names))


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
