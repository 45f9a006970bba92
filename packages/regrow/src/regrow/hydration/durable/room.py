"""Makes room on a full disk for the last state of a job, by removing older checkpoints of the same training."""

import contextlib
import errno
import shutil
from collections.abc import Callable
from typing import TypeVar

from regrow.hydration.durable.catalog import WholeCheckpoint, look
from regrow.hydration.durable.storage import CheckpointStorage, folder_at

T = TypeVar("T")
FULL = (errno.ENOSPC, errno.EDQUOT)
_SPARE = 1.05


class Room:
    """Makes room on a disk, one checkpoint at a time.

    Args:
        at: the place, and the training whose checkpoints may be removed.
        needed: number of bytes to be written.
        say: called with the address of each checkpoint that was removed.
    """

    def __init__(self, at: CheckpointStorage, needed: int, say: Callable[[str], None]) -> None:
        self._at, self._needed, self._say = at, needed, say

    def within(self, write: Callable[[], T]) -> T:
        """Call `write`, again after each failure for which room could be made. Raises the last error."""
        while True:
            try:
                return write()
            except OSError as error:
                if not self.make(error):
                    raise

    def make(self, error: OSError) -> bool:
        """Make room after a failed write; True if there is more room now.

        The oldest checkpoint is removed first. The last one is removed only if that certainly frees enough; otherwise
        no checkpoint would be left if the last state could not be written either.
        """
        if error.errno not in FULL:
            return False
        own = look(self._at).own(self._at.own)
        if not own or (len(own) == 1 and not self._is_enough(own[0])):
            return False
        self._at.remove(own[-1].folder)
        self._say(self._at.address(own[-1].folder))
        return True

    def _is_enough(self, last: WholeCheckpoint) -> bool:
        folder = folder_at(self._at.url)
        if folder is None:
            return False
        with contextlib.suppress(OSError):
            free = shutil.disk_usage(folder).free
            return free + sum(self._at.sizes(last.folder).values()) > _SPARE * self._needed
        return False
