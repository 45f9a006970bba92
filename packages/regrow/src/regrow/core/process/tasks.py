"""The one place that creates asyncio tasks, so that no exception of a task gets lost.

asyncio reports a lost exception when the task is collected, long after its work has stopped. Here each task is of one
of three kinds: its failure is reported at once (`supervised`, `Tasks`), it ends the block that started it
(`TaskScope`), or its exception goes to the callers that await the result (`shared`). A unit test refuses other tasks.
"""

import asyncio
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Self, TypeAlias, TypeVar

from regrow.core.ids import Seconds

Result = TypeVar("Result")
Fails: TypeAlias = Callable[[str, BaseException], None]
"""Called with a description of the task, and its exception."""


def supervised(work: Coroutine[Any, Any, Result], what: str, fails: Fails) -> asyncio.Task[Result]:
    """A task that nobody needs to await: if it ends with an exception, `fails` is called at once.

    Args:
        work: the coroutine.
        what: its description, such as "sending an order".
        fails: called with `what` and the exception; not after a cancellation.
    """
    task = asyncio.get_running_loop().create_task(work, name=what)
    task.add_done_callback(lambda done: _report_failure(done, what, fails))
    return task


def _report_failure(done: "asyncio.Task[Any]", what: str, fails: Fails) -> None:
    if not done.cancelled() and (error := done.exception()) is not None:
        fails(what, error)


def shared(work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
    """A task that any number of callers may await, even none: each that awaits gets the task's exception."""
    task = asyncio.get_running_loop().create_task(work)
    task.add_done_callback(seen)
    return task


def seen(done: "asyncio.Future[Any]") -> None:
    """Done callback that marks an exception as retrieved, for results that perhaps nobody awaits any more."""
    if not done.cancelled():
        done.exception()


class Tasks:
    """The background tasks of one owner, who ends them.

    Args:
        fails: called at once for each task that ends with an exception.
    """

    def __init__(self, fails: Fails) -> None:
        self._fails = fails
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, Result], what: str) -> asyncio.Task[Result]:
        """Start a task; `what`: its description."""
        task = supervised(work, what, self._fails)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def ended(self, within: Seconds) -> None:
        """Wait until all tasks have ended by themselves, but no longer than `within` seconds."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=within)

    def cancel(self) -> None:
        """Cancel all tasks."""
        for task in self._tasks:
            task.cancel()

    async def close(self, within: Seconds = 5.0) -> None:
        """Cancel all tasks, and wait until they have ended."""
        self.cancel()
        await self.ended(within)


class TaskScope:
    """`async with TaskScope() as scope`: the tasks started in the scope end with its block at the latest.

    The exception of any task ends the block at once, and is raised from it. Tasks left at the end are cancelled.
    """

    def __init__(self) -> None:
        self._group = asyncio.TaskGroup()
        self._tasks: list[asyncio.Task[Any]] = []

    async def __aenter__(self) -> Self:
        """Enter the scope."""
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancel the remaining tasks, wait for them, and raise the first failure."""
        for task in self._tasks:
            task.cancel()
        try:
            await self._group.__aexit__(kind, error, trace)
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None

    def start(self, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """Start a task."""
        task = self._group.create_task(work)
        self._tasks.append(task)
        return task

    async def wait(self) -> None:
        """Wait until all tasks have ended, or one has failed."""
        if self._tasks:
            await asyncio.wait(self._tasks)
