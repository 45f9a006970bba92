"""A thread for work that may block on a disk, so that no event loop waits for it."""

import queue
import threading
from collections.abc import Callable

from regrow.core.ids import Seconds


class Background:
    """Runs actions one after another in a thread. As a context manager, it finishes the queued actions on leaving.

    Args:
        name: name of the thread.
        within: longest wait on leaving, in seconds.
    """

    def __init__(self, name: str, *, within: Seconds = 5.0) -> None:
        self._todo: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._within = within
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def __enter__(self) -> "Background":
        """Start the thread."""
        self.start()
        return self

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        """Finish the queued actions, within the limit."""
        self.close()

    def do(self, action: Callable[[], None]) -> None:
        """Queue an action, which must not raise."""
        self._todo.put(action)

    def close(self) -> bool:
        """Finish the queued actions, within the limit; True if all ended in time."""
        self._todo.put(None)
        self._thread.join(self._within)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (action := self._todo.get()) is not None:
            action()
