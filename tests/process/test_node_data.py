"""Producers come when a worker wants one, are replaced when they die, and concern nobody else."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.process.agent_harness import NODE, PATIENCE_S, Bench, agent, exited

from regrow.agent.data_folder import DataFolder
from regrow.core.messages import facts, orders
from regrow.core.messages.data import DataNoted, producer_given_up

WORKER = """
    import os, sys, time
    from pathlib import Path
    from regrow.agent.workers.link import WorkerLink
    from regrow.core.messages.data import ProducerServed, ProducerWanted
    link = WorkerLink.current()
    env = link.env
    folder = Path(__file__).parent
    if env.producer is None:
        print("cache:", env.data, flush=True)
        for loader in {loaders}:
            link.send(ProducerWanted(env.worker, loader))
    else:
        print(f"made for {{env.producer.loader}}", env.role, env.rank, os.environ["RANK"], env.data, flush=True)
        mark = folder / f"producer-{{env.producer.loader}}-{{os.getpid()}}"
        mark.with_suffix(".new").write_text("")
        mark.with_suffix(".new").rename(mark.with_suffix(".pid"))
        {body}
    time.sleep(600)
"""
SERVES = "link.send(ProducerServed(env.worker, env.producer.loader))"


@asynccontextmanager
async def desk(folder: Path, body: str = SERVES, *, loaders: str = "[0]", **changes: Any) -> AsyncIterator[Bench]:
    """An agent with a cache, whose workers want producers that do `body`."""
    (folder / "root").mkdir()
    cache = DataFolder.make(folder / "root", "me")
    source = WORKER.format(body=body, loaders=loaders)
    try:
        async with agent(folder, source, data_dir=str(cache.path), data_budget=1 << 20, **changes) as bench:
            yield bench
    finally:
        cache.remove()
    assert list((folder / "root").iterdir()) == []


def cache_of(folder: Path) -> Path:
    (cache,) = (folder / "root").iterdir()
    return cache


async def producers(folder: Path, count: int, loader: int = 0) -> list[int]:
    """The process ids of the first `count` producers of a loader, in the order in which they started."""
    async with asyncio.timeout(PATIENCE_S):
        while len(marks := list(folder.glob(f"producer-{loader}-*.pid"))) < count:
            await asyncio.sleep(0.01)
    marks.sort(key=lambda mark: mark.stat().st_mtime_ns)
    return [int(mark.stem.rpartition("-")[2]) for mark in marks]


async def logged(bench: Bench, name: str, text: str) -> str:
    """The log, once it has this text."""
    async with asyncio.timeout(PATIENCE_S):
        while not (bench.folder / "logs" / name).exists() or text not in bench.log(name):
            await asyncio.sleep(0.01)
    return bench.log(name)


async def test_two_workers_that_want_it_get_one_producer_for_each_loader(tmp_path: Path) -> None:
    async with desk(tmp_path, loaders="[0, 1]") as bench:
        await bench.spawn("w0")
        await bench.spawn("w1", rank=1, local_rank=1)
        (first,), (second,) = await producers(tmp_path, 1), await producers(tmp_path, 1, loader=1)
        bench.note_processes()
        assert {first, second} < {child.pid for child in bench.children()}
        log = await logged(bench, "producer-0.log", "made for 0 standby 0 0 CacheSettings(folder=")
        assert "budget=1048576" in log
        await logged(bench, "rank1.log", "cache: CacheSettings(folder=")
        assert len(list(tmp_path.glob("producer-*.pid"))) == 2
        assert "made for" not in bench.shown(), "what it prints, the worker prints too"
        assert len(bench.coordinator.all(facts.WorkerStarted)) == 2, "the coordinator does not know of producers"
        assert await bench.stop() == 0
        assert await bench.nothing_left() == []
    assert not [fact for _, fact in bench.coordinator.heard if "data" in str(getattr(fact, "worker", ""))]


async def test_without_a_cache_there_is_no_producer(tmp_path: Path) -> None:
    source = WORKER.format(body=SERVES, loaders="[0]")
    async with agent(tmp_path, source) as bench:
        await bench.spawn("w0")
        await logged(bench, "rank0.log", "cache: None")
        assert await bench.stop() == 0
    assert not list(tmp_path.glob("producer-*"))


async def test_a_script_of_many_loaders_gets_a_few_producers(tmp_path: Path) -> None:
    async with desk(tmp_path, loaders="range(10)") as bench:
        await bench.spawn("w0")
        for loader in range(8):
            await producers(tmp_path, 1, loader=loader)
        for loader in (8, 9):
            noted = await bench.coordinator.expect(DataNoted)
            assert "8 other loaders have producers" in noted.text
            async with asyncio.timeout(PATIENCE_S):
                while not Path(producer_given_up(str(cache_of(tmp_path)), loader)).exists():
                    await asyncio.sleep(0.01)
        assert await bench.stop() == 0
    assert len(list(tmp_path.glob("producer-*.pid"))) == 8


@pytest.mark.parametrize("times", [1, 5])
async def test_a_producer_that_served_is_replaced_each_time_it_dies(tmp_path: Path, times: int) -> None:
    async with desk(tmp_path) as bench:
        worker = await bench.spawn("w0")
        for turn in range(times):
            pids = await producers(tmp_path, turn + 1)
            await logged(bench, "producer-0.log", f"pid {pids[-1]} ")
            os.kill(pids[-1], signal.SIGKILL)
        (*dead, alive) = await producers(tmp_path, times + 1)
        assert psutil.Process(alive).is_running()
        assert not [pid for pid in dead if psutil.pid_exists(pid)], "they are reaped"
        assert psutil.Process(worker.pid).is_running()
        assert bench.coordinator.all(facts.WorkerExited) == []
        assert bench.coordinator.all(DataNoted) == []
        assert await bench.stop() == 0


async def test_three_deaths_without_an_entry_and_there_is_no_other(tmp_path: Path) -> None:
    async with desk(tmp_path, "os.kill(os.getpid(), 9)") as bench:
        worker = await bench.spawn("w0")
        noted = await bench.coordinator.expect(DataNoted)
        assert "3 in a row made no entry, the last one was ended by SIGKILL (logs/producer-0.log)" in noted.text
        assert "loader 0 on n0" in noted.text
        assert len(await producers(tmp_path, 3)) == 3
        told = Path(producer_given_up(str(cache_of(tmp_path)), 0)).read_text()
        assert "SIGKILL" in told
        assert psutil.Process(worker.pid).is_running()
        await bench.spawn("w1", rank=1, local_rank=1)
        await logged(bench, "rank1.log", "cache:")
        assert await bench.stop() == 0
    assert len(bench.coordinator.all(DataNoted)) == 1
    assert len(await producers(tmp_path, 3)) == 3


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("raise ValueError('no such file')", "ValueError: no such file"),
        ("sys.exit(0)", "themselves: the script ended itself (0)"),
        ("os._exit(3)", "made for 0"),
        (f"{SERVES}; print('all is done', flush=True); os._exit(0)", "all is done"),
    ],
)
async def test_a_producer_that_ends_by_itself_is_not_started_again(tmp_path: Path, body: str, why: str) -> None:
    async with desk(tmp_path, body) as bench:
        await bench.spawn("w0")
        noted = await bench.coordinator.expect(DataNoted)
        assert why in noted.text
        assert len(list(tmp_path.glob("producer-0-*.pid"))) == 1
        assert await bench.stop() == 0
    assert len(bench.coordinator.all(DataNoted)) == 1
    assert "Traceback" not in bench.shown() + bench.complaints()


async def test_a_producer_dies_with_its_agent_and_so_does_what_it_started(tmp_path: Path) -> None:
    body = "import subprocess; child = subprocess.Popen(['sleep', '600']); print('child', child.pid, flush=True)"
    async with desk(tmp_path, f"{body}; {SERVES}") as bench:
        await bench.spawn("w0")
        (pid,) = await producers(tmp_path, 1)
        log = await logged(bench, "producer-0.log", "child ")
        child = psutil.Process(int(log.rpartition("child ")[2].split()[0]))
        producer = psutil.Process(pid)
        bench.process.send_signal(signal.SIGKILL)
        assert await bench.nothing_left_of([producer, child]) == []


async def test_a_dead_producer_takes_what_it_started_with_it(tmp_path: Path) -> None:
    body = "import subprocess; child = subprocess.Popen(['sleep', '600'], process_group=0); print('child', child.pid)"
    async with desk(tmp_path, f"{body}; {SERVES}") as bench:
        await bench.spawn("w0")
        (pid,) = await producers(tmp_path, 1)
        log = await logged(bench, "producer-0.log", "child ")
        child = psutil.Process(int(log.rpartition("child ")[2].split()[0]))
        os.kill(pid, signal.SIGKILL)
        assert await bench.nothing_left_of([child]) == []
        assert await bench.stop() == 0


async def test_the_zygote_may_die_under_a_producer(tmp_path: Path) -> None:
    async with desk(tmp_path) as bench:
        await bench.spawn("w0")
        (pid,) = await producers(tmp_path, 1)
        bench.zygote.kill()
        await bench.spawn("w1", rank=1, local_rank=1)
        assert psutil.Process(pid).is_running()
        os.kill(pid, signal.SIGKILL)
        _, successor = await producers(tmp_path, 2)
        bench.note_processes()
        assert psutil.Process(successor).is_running()
        bench.process.send_signal(signal.SIGKILL)
        assert await bench.nothing_left() == []


async def test_a_fenced_worker_leaves_the_producer_alone(tmp_path: Path) -> None:
    async with desk(tmp_path) as bench:
        await bench.spawn("w0")
        (pid,) = await producers(tmp_path, 1)
        await bench.coordinator.order(
            orders.FenceWorker(NODE, bench.coordinator.all(facts.WorkerStarted)[0].worker, "a test")
        )
        assert await exited(bench) == -signal.SIGKILL
        await bench.spawn("w1")
        assert psutil.Process(pid).is_running()
        assert len(list(tmp_path.glob("producer-0-*.pid"))) == 1, "the new worker uses the same"
        assert await bench.stop() == 0


async def test_the_end_does_not_wait_for_a_producer_that_does_not_listen(tmp_path: Path) -> None:
    body = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SERVES}"
    async with desk(tmp_path, body) as bench:
        await bench.spawn("w0")
        await producers(tmp_path, 1)
        bench.note_processes()
        assert await bench.stop(grace=0.0) == 0
        assert await bench.nothing_left() == []
        assert list((tmp_path / "root").iterdir()) == [], "the cache is gone when the agent is"
