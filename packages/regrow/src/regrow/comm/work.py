"""Work handles: the results of asynchronous collectives, and the promises that complete them."""

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
"""torch's value that means no timeout."""


Help = Callable[[threading.Event, float], None]
"""Runs other calls until the event is set, or until this time of the monotonic clock."""


class PendingWork(Work):
    """A work handle on a future that the transport completes, or fails when it is halted.

    Args:
        future: its value is the list of result tensors.
        promise: owner of the future.
    """

    def __init__(self, future: "Future[Any]", promise: "Promise") -> None:
        super().__init__()
        self._future, self._promise = future, promise
        self._ended, self._source = promise.ended, promise.source

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the work is done. Raises the collective's error, or `DeadlineExceeded` after `timeout`, if given.

        An error in the script's own call is raised as `CollectiveMisuse`, any other error in torch's form.
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
        """Wait for the work, like `wait`."""
        self.wait()

    @property
    def failure(self) -> Exception | None:
        """The error with which the transport has failed it; None if it has not failed."""
        return self._promise.error

    def is_success(self) -> bool:
        """True if the work is done and did not fail."""
        return self._ended.is_set() and self.exception() is None

    def exception(self) -> Exception | None:
        """The error with which the work failed; None if it did not fail."""
        if not self._ended.is_set():
            return None
        try:
            self._future.wait()
        except Exception as error:  # noqa: BLE001  it is the answer
            return error
        return None

    def source_rank(self) -> int:
        """Rank of the sender whose data a `recv` from any source has received."""
        if not self._source:
            raise UsageError("only a finished receive from any source has a source rank")
        return self._source[0]

    def _source_rank(self) -> int:
        return self.source_rank()

    def is_completed(self) -> bool:
        """True if the work is done."""
        return bool(self._future.done())

    def get_future(self) -> "Future[Any]":
        """The future; its value is the list of result tensors."""
        return self._future

    def result(self) -> Any:
        """The result tensors."""
        return self._future.wait()


class FollowedWork(Work):
    """Wraps work of another kind, and calls `then` once after its end, when its result may be read.

    Args:
        inner: the work; None until it is known, while calls are being coalesced.
        then: the call.
    """

    def __init__(self, inner: Work | None, then: Callable[[], object]) -> None:
        super().__init__()
        self.inner, self._then = inner, then
        self._followed = False

    def follow(self) -> None:
        """Wait for the work, and call `then` if that was not done yet."""
        if self.inner is not None and not self._followed:
            self._followed = True
            self.inner.wait()
            self._then()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the work, then call `follow`."""
        if self.inner is not None:
            self.inner.wait() if timeout is None else self.inner.wait(timeout)
        self.follow()
        return True

    def synchronize(self) -> None:
        """Wait for the work, like `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """True if the work is done."""
        return self.inner is not None and bool(self.inner.is_completed())

    def is_success(self) -> bool:
        """True if the work is done and did not fail."""
        return self.inner is not None and bool(self.inner.is_success())

    def exception(self) -> Any:
        """The error with which the work failed; None if it did not fail."""
        return None if self.inner is None else self.inner.exception()

    def get_future(self) -> Any:
        """The future of the wrapped work."""
        return None if self.inner is None else self.inner.get_future()

    def result(self) -> Any:
        """The result of the wrapped work."""
        return None if self.inner is None else self.inner.result()


_noting = threading.local()


@contextmanager
def noting(then: Callable[[int], None]) -> Iterator[None]:
    """Context in which this thread's next promise calls `then(sender, or -1)` just before it completes."""
    _noting.then = then
    try:
        yield
    finally:
        _noting.then = None


def finished_work(result: Any, *, source: int = -1) -> Work:
    """A finished work handle, with `result` as its value."""
    promise = Promise()
    promise.source.append(source)
    promise.complete(result)
    return promise.work()


def joint_work(works: list[Work]) -> Work:
    """A work handle that is done when all of these are done."""
    promise = Promise()

    def end(all_done: "Future[Any]") -> None:
        try:
            promise.complete([value for future in all_done.value() for value in future.value()])
        except Exception as error:  # noqa: BLE001  whoever waits gets it
            promise.fail(next((found for work in works if (found := _misuse_of(work)) is not None), error))

    futures = [work.get_future() for work in works]
    torch.futures.collect_all(futures).add_done_callback(end)
    return promise.work()


def _misuse_of(work: Work) -> CollectiveMisuse | None:
    error = work.failure if isinstance(work, PendingWork) else None
    return error if isinstance(error, CollectiveMisuse) else None


class Promise:
    """The writing end of a future, which the transport holds.

    `Future.set_exception` passes the exception to C++ as if it were the result, and DDP then takes it for its tensors.
    A callback that raises turns it into an error that C++ recognizes.
    """

    def __init__(self, helps: "Help | None" = None) -> None:
        self._outcome: Future[Any] = Future()
        self._future: Future[Any] = self._outcome.then(_unwrapped)
        self.help = helps
        """Called first by a waiter: the thread that must complete this promise must not wait for itself."""
        self.ended = threading.Event()
        """Set when the future is completed, or just before."""
        self.error: Exception | None = None
        self.source: list[int] = []
        """The sender's rank, once that is known."""
        self._flight = FLIGHT.begin()
        self._then: Callable[[int], None] | None = getattr(_noting, "then", None)
        _noting.then = None

    def work(self) -> Work:
        """The handle to wait on."""
        return PendingWork(self._future, self)

    def complete(self, result: Any) -> None:
        """Complete the future with a result."""
        if self._then is not None:
            self._then(self.source[0] if self.source else -1)
        FLIGHT.end(self._flight)
        self.ended.set()
        self._outcome.set_result((None, result))

    def fail(self, error: Exception) -> None:
        """Complete the future with an error, which waiting raises."""
        FLIGHT.end(self._flight)
        self.error = error
        self.ended.set()
        self._outcome.set_result((error, None))


def _unwrapped(outcome: "Future[Any]") -> Any:
    error, result = outcome.value()
    if error is not None:
        raise error
    return result
