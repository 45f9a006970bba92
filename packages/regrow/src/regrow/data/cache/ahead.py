"""Opens the next entry while a step computes, so that the next step does not wait for its checksum."""

import threading
import time
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from regrow.core.ids import Seconds

_WAIT_S: Seconds = 30.0
_END_S: Seconds = 5.0

Asked = TypeVar("Asked")
Found = TypeVar("Found")


class _Outcome(NamedTuple, Generic[Asked, Found]):
    asked: Asked
    found: Found | None
    error: Exception | None


class Ahead(Generic[Asked, Found]):
    """Calls `look` ahead of time, in a thread that the first `start` starts.

    Args:
        look: finds the data for a request, or returns None. It runs in the thread and must be thread-safe.
    """

    def __init__(self, look: Callable[[Asked], Found | None]) -> None:
        self._look = look
        self._changed = threading.Condition()
        self._wanted: Asked | None = None
        self._running: Asked | None = None
        self._outcome: _Outcome[Asked, Found] | None = None
        self._closed = False
        self._thread: threading.Thread | None = None

    def start(self, asked: Asked) -> None:
        """Start to call `look` for this request; drops the result of any other request."""
        with self._changed:
            known = self._outcome.asked if self._outcome is not None else None
            if self._closed or asked in (self._running, known):
                return
            self._wanted, self._outcome = asked, None
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="regrow-data", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def take(self, asked: Asked) -> Found | None:
        """Take the result of `look` for this request, once; None if there is none. Raises the error of `look`."""
        deadline = time.monotonic() + _WAIT_S
        with self._changed:
            if self._wanted == asked:
                self._wanted = None  # `look` has not started yet: the caller can call it as well as the thread
            while self._running == asked and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            outcome = self._outcome
            if outcome is None or outcome.asked != asked:
                return None
            self._outcome = None
        if outcome.error is not None:
            raise outcome.error
        return outcome.found

    def idle(self) -> None:
        """Wait until no call of `look` is running or pending."""
        with self._changed:
            self._changed.wait_for(lambda: self._running is None and self._wanted is None, _WAIT_S)

    def close(self) -> None:
        """End the thread and wait for its end. The result is dropped."""
        with self._changed:
            self._closed = True
            self._wanted = self._outcome = None
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(_END_S)

    def _work(self) -> None:
        while True:
            with self._changed:
                while self._wanted is None and not self._closed:
                    self._changed.wait()
                asked = self._wanted
                if asked is None or self._closed:
                    return
                self._wanted = None
                self._running = asked
            found: Found | None = None
            failed: Exception | None = None
            try:
                found = self._look(asked)
            except Exception as error:  # noqa: BLE001 - raised again by `take`
                failed = error
            with self._changed:
                self._running = None
                if self._wanted is None:
                    self._outcome = _Outcome(asked, found, failed)
                self._changed.notify_all()
