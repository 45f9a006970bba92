"""No task's exception is nobody's: told at once, or raised in the block that the task belongs to."""

import asyncio
import gc

import pytest

from regrow.core.process.tasks import Tasks, TaskScope, shared, supervised

PATIENCE = 30.0


async def broken() -> None:
    await asyncio.sleep(0)
    raise OSError(28, "No space left on device")


async def endless() -> None:
    await asyncio.Event().wait()


async def test_a_failure_is_told_when_it_happens_and_not_when_somebody_asks() -> None:
    told: asyncio.Future[tuple[str, BaseException]] = asyncio.get_running_loop().create_future()
    task = supervised(broken(), "writing", lambda what, error: told.set_result((what, error)))
    what, error = await asyncio.wait_for(told, PATIENCE)
    assert (what, isinstance(error, OSError)) == ("writing", True)
    assert task.done()


async def test_who_is_cancelled_has_not_failed() -> None:
    told: list[str] = []
    tasks = Tasks(lambda what, _: told.append(what))
    task = tasks.start(endless(), "waiting")
    await asyncio.sleep(0)
    await tasks.close()
    assert task.cancelled()
    assert told == []


async def test_one_that_fails_harms_no_other_of_the_same_owner() -> None:
    told: list[str] = []
    tasks = Tasks(lambda what, _: told.append(what))
    other = tasks.start(endless(), "waiting")
    tasks.start(broken(), "writing")
    await tasks.ended(0.05)
    assert told == ["writing"]
    assert not other.done()
    await tasks.close()


async def test_a_failure_ends_the_block_that_waits_for_something_else() -> None:
    async def block() -> None:
        async with TaskScope() as scope:
            scope.start(broken())
            await endless()

    with pytest.raises(OSError, match="No space left"):
        await asyncio.wait_for(block(), PATIENCE)


async def test_what_is_left_ends_with_the_block_and_cleans_up_before_it_is_over() -> None:
    cleaned: list[str] = []

    async def tidy() -> None:
        try:
            await endless()
        finally:
            await asyncio.sleep(0)
            cleaned.append("tidy")

    async with TaskScope() as scope:
        scope.start(tidy())
        await asyncio.sleep(0)
    assert cleaned == ["tidy"]


async def test_an_error_of_the_block_itself_is_raised_as_it_is() -> None:
    with pytest.raises(KeyError):
        async with TaskScope() as scope:
            scope.start(endless())
            raise KeyError("own")


async def test_a_shared_answer_fails_in_each_who_asks_and_in_nobody_else() -> None:
    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    question = shared(broken())
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            await asyncio.shield(question)
    unasked = shared(broken())
    await asyncio.wait({unasked})
    del question, unasked
    gc.collect()
    assert complaints == []
