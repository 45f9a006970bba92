"""Full collections of garbage wait for a quiet moment, come then, and are as they were afterwards."""

import asyncio
import gc
from collections.abc import Iterator

import pytest

from regrow.membership.server.collecting import QuietCollections

EVERY = 0.005


@pytest.fixture(autouse=True)
def usual() -> Iterator[None]:
    """Python's own thresholds; others in this process may have set higher ones."""
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


@pytest.fixture
def full() -> Iterator[list[str]]:
    """An entry for each full collection."""
    seen: list[str] = []

    def tell(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            seen.append(phase)

    gc.callbacks.append(tell)
    yield seen
    gc.callbacks.remove(tell)


def churn() -> None:
    """As many young collections as usually bring a full one, several times."""
    kept: list[list[list[int]]] = []
    for _ in range(60):
        kept.append([[] for _ in range(2000)])
        gc.collect(1)


async def until(full: list[str], number: int) -> None:
    async with asyncio.timeout(30):
        while len(full) < number:
            await asyncio.sleep(EVERY)


async def test_they_wait_until_nothing_happens(full: list[str]) -> None:
    quiet = False
    with QuietCollections(lambda: quiet, every=EVERY):
        full.clear()
        churn()
        for _ in range(5):
            await asyncio.sleep(EVERY)
        assert full == []
        quiet = True
        await until(full, 1)


async def test_they_are_not_put_off_for_ever(full: list[str]) -> None:
    with QuietCollections(lambda: False, every=EVERY):
        full.clear()
        churn()
        await until(full, 1)


async def test_none_comes_where_nothing_was_made(full: list[str]) -> None:
    gc.collect()
    with QuietCollections(lambda: True, every=EVERY):
        full.clear()
        for _ in range(10):
            await asyncio.sleep(EVERY)
        assert full == []


async def test_afterwards_all_is_as_it_was() -> None:
    before = gc.get_threshold()
    with QuietCollections(lambda: True, every=EVERY):
        assert gc.get_threshold()[2] > before[2]
        assert gc.get_freeze_count()
    assert (gc.get_threshold(), gc.get_freeze_count()) == (before, 0)
