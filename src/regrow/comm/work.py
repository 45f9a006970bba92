"""Work handles: what a collective returns, and what ends it."""

import threading
from datetime import timedelta
from typing import Any

import torch
from torch.futures import Future

from regrow.comm.private import Work
from regrow.core.errors import DeadlineExceeded, UsageError

NO_TIMEOUT = timedelta(0)
"""What torch passes where no timeout is meant."""


class PendingWork(Work):
    """A work handle on a future that the transport completes, or fails when it is halted.

    Args:
        future: its value is the list of result tensors.
        ended: set when the future is, or is about to be.
        source: holds the rank that sent, once that is known.
    """

    def __init__(self, future: "Future[Any]", ended: threading.Event, source: list[int]) -> None:
        super().__init__()
        self._future, self._ended, self._source = future, ended, source

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until done. Raises what the collective raised; `DeadlineExceeded` after `timeout`, if that is given."""
        if timeout is not None and timeout > NO_TIMEOUT and not self._ended.wait(timeout.total_seconds()):
            raise DeadlineExceeded(f"a collective was not done within {timeout.total_seconds():.3f} s")
        self._future.wait()
        return True

    def synchronize(self) -> None:
        """The same as `wait`."""
        self._future.wait()

    def is_success(self) -> bool:
        """Whether it is done and did not fail."""
        return self._ended.is_set() and self.exception() is None

    def exception(self) -> Exception | None:
        """What it failed with, if it did."""
        if not self._ended.is_set():
            return None
        try:
            self._future.wait()
        except Exception as error:  # noqa: BLE001  it is the answer
            return error
        return None

    def source_rank(self) -> int:
        """Who sent what a `recv` from any source has received."""
        if not self._source:
            raise UsageError("only a finished receive from any source has a source rank")
        return self._source[0]

    def _source_rank(self) -> int:
        return self.source_rank()

    def is_completed(self) -> bool:
        """Whether it is done."""
        return bool(self._future.done())

    def get_future(self) -> "Future[Any]":
        """The future; its value is the list of result tensors."""
        return self._future

    def result(self) -> Any:
        """The result tensors."""
        return self._future.wait()


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
            promise.fail(error)

    futures = [work.get_future() for work in works]
    torch.futures.collect_all(futures).add_done_callback(end)
    return promise.work()


class Promise:
    """The end of a future that the transport holds.

    `Future.set_exception` hands the exception to C++ as if it were the result, and DDP then takes it for its tensors. A
    callback that raises makes an error of it that C++ knows.
    """

    def __init__(self) -> None:
        self._outcome: Future[Any] = Future()
        self._future: Future[Any] = self._outcome.then(_unwrapped)
        self._ended = threading.Event()
        self.source: list[int] = []

    def work(self) -> Work:
        """The handle for who waits."""
        return PendingWork(self._future, self._ended, self.source)

    def keep(self, result: Any) -> None:
        """The result is there."""
        self._outcome.set_result((None, result))
        self._ended.set()

    def fail(self, error: Exception) -> None:
        """There will be no result; waiting raises."""
        self._outcome.set_result((error, None))
        self._ended.set()


def _unwrapped(outcome: "Future[Any]") -> Any:
    error, result = outcome.value()
    if error is not None:
        raise error
    return result
