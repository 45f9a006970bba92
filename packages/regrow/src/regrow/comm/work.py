"""Work handles: what a collective returns, and what ends it."""

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch.futures import Future

from regrow.comm.flight import FLIGHT
from regrow.comm.torch_private.internals import Work
from regrow.core.errors import CollectiveMisuse, DeadlineExceeded, UsageError

NO_TIMEOUT = timedelta(0)
"""Value that torch passes if no timeout is meant."""


Help = Callable[[threading.Event, float], None]
"""Does what it can until the event is set, or a moment of the monotonic clock has come."""


class PendingWork(Work):
    """A work handle on a future that the transport completes, or fails when it is halted.

    Args:
        future: its value is the list of result tensors.
        promise: whose future it is.
    """

    def __init__(self, future: "Future[Any]", promise: "Promise") -> None:
        super().__init__()
        self._future, self._promise = future, promise
        self._ended, self._source = promise.ended, promise.source

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until done. Raises what the collective raised; `DeadlineExceeded` after `timeout`, if that is given.

        An error of the script's own call is raised as the `CollectiveMisuse` that it is, any other as torch has it.
        """
        limited = timeout is not None and timeout > NO_TIMEOUT
        seconds = timeout.total_seconds() if timeout is not None and limited else None
        if self._promise.help is not None and not self._ended.is_set():
            self._promise.help(self._ended, math.inf if seconds is None else time.monotonic() + seconds)
        if seconds is not None and not self._ended.wait(seconds):
            raise DeadlineExceeded(f"a collective was not done within {seconds:.3f} s")
        try:
            self._future.wait()
        except RuntimeError:
            misuse = _misuse_of(self)
            if misuse is not None:
                raise misuse from None
            raise
        return True

    def synchronize(self) -> None:
        """The same as `wait`."""
        self.wait()

    @property
    def failure(self) -> Exception | None:
        """Error with which the transport ended it, if any."""
        return self._promise.error

    def is_success(self) -> bool:
        """True if it is done and did not fail."""
        return self._ended.is_set() and self.exception() is None

    def exception(self) -> Exception | None:
        """Error with which it failed, if it did."""
        if not self._ended.is_set():
            return None
        try:
            self._future.wait()
        except Exception as error:  # noqa: BLE001  it is the answer
            return error
        return None

    def source_rank(self) -> int:
        """Sender of the data that a `recv` from any source has received."""
        if not self._source:
            raise UsageError("only a finished receive from any source has a source rank")
        return self._source[0]

    def _source_rank(self) -> int:
        return self.source_rank()

    def is_completed(self) -> bool:
        """True if it is done."""
        return bool(self._future.done())

    def get_future(self) -> "Future[Any]":
        """The future; its value is the list of result tensors."""
        return self._future

    def result(self) -> Any:
        """The result tensors."""
        return self._future.wait()


class FollowedWork(Work):
    """A work of another kind, after whose end something is done once: when its result may be read.

    Args:
        inner: the work; None until it is known, where calls are being put together.
        then: what is done.
    """

    def __init__(self, inner: Work | None, then: Callable[[], object]) -> None:
        super().__init__()
        self.inner, self._then = inner, then
        self._followed = False

    def follow(self) -> None:
        """Wait, and do it, unless that was done."""
        if self.inner is not None and not self._followed:
            self._followed = True
            self.inner.wait()
            self._then()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """As the work's own."""
        if self.inner is not None:
            self.inner.wait() if timeout is None else self.inner.wait(timeout)
        self.follow()
        return True

    def synchronize(self) -> None:
        """The same as `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """True if it is done."""
        return self.inner is not None and bool(self.inner.is_completed())

    def is_success(self) -> bool:
        """True if it is done and did not fail."""
        return self.inner is not None and bool(self.inner.is_success())

    def exception(self) -> Any:
        """Error with which it failed, if it did."""
        return None if self.inner is None else self.inner.exception()

    def get_future(self) -> Any:
        """The work's own."""
        return None if self.inner is None else self.inner.get_future()

    def result(self) -> Any:
        """The work's own."""
        return None if self.inner is None else self.inner.result()


_noting = threading.local()


@contextmanager
def noting(then: Callable[[int], None]) -> Iterator[None]:
    """Have the next promise that this thread makes call `then` just before its end, with the sender's rank or -1."""
    _noting.then = then
    try:
        yield
    finally:
        _noting.then = None


def finished_work(result: Any, *, source: int = -1) -> Work:
    """A work handle that is done already, with `result` as its value."""
    promise = Promise()
    promise.source.append(source)
    promise.keep(result)
    return promise.work()


def joint_work(works: list[Work]) -> Work:
    """A work handle that is done when all of these are."""
    promise = Promise()

    def end(all_done: "Future[Any]") -> None:
        try:
            promise.keep([value for future in all_done.value() for value in future.value()])
        except Exception as error:  # noqa: BLE001  whoever waits gets it
            promise.fail(next((found for work in works if (found := _misuse_of(work)) is not None), error))

    futures = [work.get_future() for work in works]
    torch.futures.collect_all(futures).add_done_callback(end)
    return promise.work()


def _misuse_of(work: Work) -> CollectiveMisuse | None:
    error = work.failure if isinstance(work, PendingWork) else None
    return error if isinstance(error, CollectiveMisuse) else None


class Promise:
    """The end of a future that the transport holds.

    `Future.set_exception` hands the exception to C++ as if it were the result, and DDP then takes it for its tensors. A
    callback that raises makes an error of it that C++ knows.
    """

    def __init__(self, helps: "Help | None" = None) -> None:
        self._outcome: Future[Any] = Future()
        self._future: Future[Any] = self._outcome.then(_unwrapped)
        self.help = helps
        """Called by a waiter first: the thread that is to end this must not wait for itself."""
        self.ended = threading.Event()
        """Set when the future is, or is about to be."""
        self.error: Exception | None = None
        self.source: list[int] = []
        """The rank that sent, once that is known."""
        self._flight = FLIGHT.begin()
        self._then: Callable[[int], None] | None = getattr(_noting, "then", None)
        _noting.then = None

    def work(self) -> Work:
        """The handle for who waits."""
        return PendingWork(self._future, self)

    def keep(self, result: Any) -> None:
        """The result is there."""
        if self._then is not None:
            self._then(self.source[0] if self.source else -1)
        FLIGHT.end(self._flight)
        self.ended.set()
        self._outcome.set_result((None, result))

    def fail(self, error: Exception) -> None:
        """There will be no result; waiting raises."""
        FLIGHT.end(self._flight)
        self.error = error
        self.ended.set()
        self._outcome.set_result((error, None))


def _unwrapped(outcome: "Future[Any]") -> Any:
    error, result = outcome.value()
    if error is not None:
        raise error
    return result
