"""The folder of an agent's data cache: private, locked while it is in use, and removed even after a kill.

Its name is `regrow-data-<uid>-<random>`. The launcher makes it and its agent uses it; both hold a shared lock on the
file `owner` in it. The kernel releases a lock when its holder dies, so a folder without a lock was left by a job that
was killed, and the next job of the same user removes it.
"""

import contextlib
import errno
import fcntl
import os
import re
import shutil
import tempfile
import time
from pathlib import Path

from regrow.core.ids import Seconds

_OWNER = "owner"
_BEING_MADE_S: Seconds = 60.0
"""Age up to which a folder without `owner` counts as being made."""
_TRIES = 20
_PAUSE_S: Seconds = 0.002


class DataFolder:
    """A data folder that this process keeps in use. A process that shares it may have removed `path`.

    Args:
        path: path of the folder.
        lock: locked descriptor of its file `owner`.
    """

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def make(cls, root: Path, whose: str) -> "DataFolder":
        """Make a folder below `root`. `whose`: text for people, written into `owner`. Raises `OSError`."""
        path = Path(tempfile.mkdtemp(prefix=_prefix(), dir=root))
        try:
            # Locked before it gets its name, so that no process finds it unlocked.
            temporary = path / f"{_OWNER}.new"
            lock = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                os.write(lock, f"{whose}\n".encode())
                temporary.rename(path / _OWNER)
            except OSError:
                os.close(lock)
                raise
        except OSError:
            shutil.rmtree(path, ignore_errors=True)
            raise
        return cls(path, lock)

    @classmethod
    def share(cls, path: Path) -> "DataFolder":
        """Use a folder that another process has made. Raises `OSError` if it is gone or is about to be removed."""
        lock = os.open(path / _OWNER, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            raise
        return cls(path, lock)

    def remove(self) -> None:
        """Remove the folder with its contents and release the lock. Raises `OSError` if something remains."""
        try:
            _remove(self.path)
        finally:
            if self._lock >= 0:
                os.close(self._lock)
                self._lock = -1


def sweep(root: Path) -> list[str]:
    """Remove this user's folders below `root` that no process holds; returns their names. Raises no error."""
    swept: list[str] = []
    with contextlib.suppress(OSError), os.scandir(root) as entries:
        for entry in entries:
            if _NAME.fullmatch(entry.name) is None or not _left_over(root / entry.name):
                continue
            with contextlib.suppress(OSError):
                _remove(root / entry.name)
                swept.append(entry.name)
    return swept


def _prefix() -> str:
    return f"regrow-data-{os.getuid()}-"


_NAME = re.compile(re.escape(_prefix()) + r"[a-z0-9_]{8}")


def _open(path: Path) -> int:
    """Open a folder of this user without following a link. Raises `OSError`."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    if os.fstat(folder).st_uid != os.getuid():
        os.close(folder)
        raise PermissionError(errno.EPERM, "it belongs to another user", str(path))
    return folder


def _left_over(path: Path) -> bool:
    """True if this is a folder of this user that no process holds."""
    try:
        folder = _open(path)
    except OSError:
        return False
    try:
        owner = os.open(_OWNER, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=folder)
    except FileNotFoundError:
        return time.time() - os.fstat(folder).st_mtime > _BEING_MADE_S
    except OSError:
        return False
    finally:
        os.close(folder)
    try:
        fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(owner)
    return True


def _remove(path: Path) -> None:
    for turn in range(_TRIES):
        try:
            folder = _open(path)
        except FileNotFoundError:
            return  # Another process that shared it was faster.
        try:
            _empty(folder)
            path.rmdir()
        except OSError:
            # Another process is removing the folder too, or a process that is about to be killed has made another file.
            if turn == _TRIES - 1:
                raise
            time.sleep(_PAUSE_S)
        else:
            return
        finally:
            os.close(folder)


def _empty(folder: int) -> None:
    """Empty a folder; `owner` goes last, so that the next sweep continues a removal that was cut short."""
    with os.scandir(folder) as entries:
        inside = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries if entry.name != _OWNER]
    for name, is_folder in inside:
        if is_folder:
            shutil.rmtree(name, dir_fd=folder)
        else:
            os.unlink(name, dir_fd=folder)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(_OWNER, dir_fd=folder)
