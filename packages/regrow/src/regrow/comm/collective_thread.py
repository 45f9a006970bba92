"""The thread in which the collectives of a group run, one after another."""

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from regrow.comm.torch_private.internals import Work
from regrow.comm.work import Promise
from regrow.core.errors import CollectiveMisuse, RegrowError
from regrow.core.ids import Seconds

END_S: Seconds = 5.0
_LOOK_S: Seconds = 0.05


@dataclass
class _Submitted:
    call: Callable[[], Any]
    promise: Promise
    result: Any


class CollectiveThread:
    """Runs calls one after another in a thread of its own; each call completes a future.

    A future's callbacks run in this thread. A call made in a callback runs at once, before calls that were submitted
    meanwhile, so that its place in the order of calls is the same on all ranks, however fast each is.

    Args:
        failed: called with every error of a call.
    """

    def __init__(self, name: str, failed: Callable[[Exception], None]) -> None:
        self._calls: queue.SimpleQueue[_Submitted | None] = queue.SimpleQueue()
        self._failed = failed
        self._broken: Exception | None = None
        self._over = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], Any], result: Any) -> Work:
        """Run `call` after the earlier ones; the work's value is `result`, its source the rank that `call` returns."""
        promise = Promise(self._help)
        submitted = _Submitted(call, promise, result)
        work = promise.work()
        if self._is_here():
            self._perform(submitted)
        else:
            self._calls.put(submitted)
        return work

    def _is_here(self) -> bool:
        return threading.get_ident() == self._thread.ident

    def _run(self) -> None:
        while not self._over:
            self._next(None)

    def _next(self, seconds: Seconds | None) -> None:
        try:
            submitted = self._calls.get(timeout=seconds)
        except queue.Empty:
            return
        if submitted is None:
            self._over = True
        else:
            self._perform(submitted)

    def _help(self, ended: threading.Event, until: float) -> None:
        """For a callback that waits for a later call of this thread: run the calls before it, and that later call."""
        while self._is_here() and not self._over and not ended.is_set() and time.monotonic() < until:
            self._next(_LOOK_S)

    def _perform(self, submitted: _Submitted) -> None:
        promise = submitted.promise
        try:
            if self._broken is not None:
                raise self._broken
            with torch.no_grad():
                source = submitted.call()
            if source is not None:
                promise.source.append(source)
        except Exception as error:  # noqa: BLE001  whoever waits for the future gets it
            cause = _named(error)
            # An interrupted transfer leaves these connections unusable: no later call on them can be right.
            self._broken = cause
            self._failed(cause)
            promise.fail(cause)
        else:
            promise.complete(submitted.result)

    def end(self) -> None:
        """Let the thread end once all submitted calls have run or failed."""
        self._calls.put(None)
        if not self._is_here():
            self._thread.join(END_S)


def _named(error: Exception) -> Exception:
    """Return errors of connections and of this package unchanged, and any other as misuse: the arguments do not fit."""
    if isinstance(error, OSError | RegrowError):
        return error
    misuse = CollectiveMisuse(f"{type(error).__name__}: {error}", hint="do the tensors fit this collective?")
    misuse.__cause__ = error
    return misuse
