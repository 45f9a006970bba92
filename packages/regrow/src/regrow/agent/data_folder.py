"""The folder of an agent's data cache: private, locked as long as somebody needs it, removed whatever happens.

Its name is `regrow-data-<uid>-<random>`. The launcher makes it and its agent uses it; both hold a shared lock on the
file `owner` in it. The kernel takes a lock back when its holder dies, so a folder whose lock nobody holds was left by a
job that was killed, and the next job of the same user removes it.
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
"""A folder without an `owner` is being made, unless it is older than this."""
_TRIES = 20
_PAUSE_S: Seconds = 0.002


class DataFolder:
    """A folder, and this process's part in keeping it. `path` may have been removed by whoever shares it.

    Args:
        path: where it is.
        lock: descriptor of its `owner`, locked.
    """

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def make(cls, root: Path, whose: str) -> "DataFolder":
        """A new one below `root`. `whose`: written into `owner`, for people who wonder. Raises `OSError`."""
        path = Path(tempfile.mkdtemp(prefix=_prefix(), dir=root))
        try:
            # Locked before it has its name: whoever finds the name finds the lock.
            draft = path / f"{_OWNER}.new"
            lock = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                os.write(lock, f"{whose}\n".encode())
                draft.rename(path / _OWNER)
            except OSError:
                os.close(lock)
                raise
        except OSError:
            shutil.rmtree(path, ignore_errors=True)
            raise
        return cls(path, lock)

    @classmethod
    def share(cls, path: Path) -> "DataFolder":
        """One that another process has made. Raises `OSError`: it is gone, or about to be."""
        lock = os.open(path / _OWNER, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            raise
        return cls(path, lock)

    def remove(self) -> None:
        """Remove it with all that is in it, and let go of the lock. Raises `OSError` where something stays."""
        try:
            _remove(self.path)
        finally:
            if self._lock >= 0:
                os.close(self._lock)
                self._lock = -1


def sweep(root: Path) -> list[str]:
    """Remove the folders of this user below `root` that nobody holds; returns their names. Raises no error."""
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
    """A folder of this user's; no link is followed. Raises `OSError`."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    if os.fstat(folder).st_uid != os.getuid():
        os.close(folder)
        raise PermissionError(errno.EPERM, "it belongs to another user", str(path))
    return folder


def _left_over(path: Path) -> bool:
    """True if it is a folder of this user's that no process holds."""
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
            return  # whoever shares it was quicker
        try:
            _empty(folder)
            path.rmdir()
        except OSError:
            # Another process removes the same, or one that is about to be killed has made another file.
            if turn == _TRIES - 1:
                raise
            time.sleep(_PAUSE_S)
        else:
            return
        finally:
            os.close(folder)


def _empty(folder: int) -> None:
    """`owner` goes last, so that a removal that is cut short is taken up by the next sweep."""
    with os.scandir(folder) as entries:
        inside = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries if entry.name != _OWNER]
    for name, is_folder in inside:
        if is_folder:
            shutil.rmtree(name, dir_fd=folder)
        else:
            os.unlink(name, dir_fd=folder)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(_OWNER, dir_fd=folder)
