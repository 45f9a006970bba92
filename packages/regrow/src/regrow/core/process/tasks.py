"""The one place that makes asyncio tasks, so that no task's exception is nobody's.

asyncio tells of a lost exception when the task is collected, long after what the task was for has stopped. Here each
task is of one of three kinds: its failure is told at once (`supervised`, `Tasks`), it ends the block that started it
(`TaskScope`), or it belongs to those who ask for the answer (`shared`). A unit test refuses others.
"""

import asyncio
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Self, TypeAlias, TypeVar

from regrow.core.ids import Seconds

Result = TypeVar("Result")
Fails: TypeAlias = Callable[[str, BaseException], None]
"""Told what failed, in words, and with which exception."""


def supervised(work: Coroutine[Any, Any, Result], what: str, fails: Fails) -> asyncio.Task[Result]:
    """A task that nobody needs to await: when it ends with an exception, `fails` is called at once.

    Args:
        work: what it does.
        what: that in words, as in "sending an order".
        fails: told `what` and the exception; not of a cancellation.
    """
    task = asyncio.get_running_loop().create_task(work, name=what)
    task.add_done_callback(lambda done: _report_failure(done, what, fails))
    return task


def _report_failure(done: "asyncio.Task[Any]", what: str, fails: Fails) -> None:
    if not done.cancelled() and (error := done.exception()) is not None:
        fails(what, error)


def shared(work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
    """A question that several may wait for: its exception is raised in each that does, of whom there may be none."""
    task = asyncio.get_running_loop().create_task(work)
    task.add_done_callback(seen)
    return task


def seen(done: "asyncio.Future[Any]") -> None:
    """To be called with what is done, where perhaps nobody is left to look at its error."""
    if not done.cancelled():
        done.exception()


class Tasks:
    """The background tasks of one owner, which ends them.

    Args:
        fails: told of each that ends with an exception, at once.
    """

    def __init__(self, fails: Fails) -> None:
        self._fails = fails
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, Result], what: str) -> asyncio.Task[Result]:
        """Start one; `what`: it in words."""
        task = supervised(work, what, self._fails)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def ended(self, within: Seconds) -> None:
        """Wait until all have ended by themselves, but no longer."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=within)

    def cancel(self) -> None:
        """End all, at their next wait."""
        for task in self._tasks:
            task.cancel()

    async def close(self, within: Seconds = 5.0) -> None:
        """End all, and wait until they have."""
        self.cancel()
        await self.ended(within)


class TaskScope:
    """`async with TaskScope() as scope`: tasks that end with the block, at the latest.

    The exception of any ends the block at once, and is raised from it. Those that are left at its end are cancelled.
    """

    def __init__(self) -> None:
        self._group = asyncio.TaskGroup()
        self._tasks: list[asyncio.Task[Any]] = []

    async def __aenter__(self) -> Self:
        """Begin."""
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancel what is left, wait for it, and raise what has failed first."""
        for task in self._tasks:
            task.cancel()
        try:
            await self._group.__aexit__(kind, error, trace)
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None

    def start(self, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """Start one."""
        task = self._group.create_task(work)
        self._tasks.append(task)
        return task

    async def wait(self) -> None:
        """Until all have ended, or one has failed."""
        if self._tasks:
            await asyncio.wait(self._tasks)
