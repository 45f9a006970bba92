"""The life of an agent: what it outlives, what ends it, and that nothing is ever left behind."""

import asyncio
import itertools
import os
import signal
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from tests.process.agent_harness import NODE, PATIENCE_S, Bench, StoreClient, agent, exited
from tests.process.launching import named

from regrow.core.config import Script
from regrow.core.ids import Generation, Rank, WorkerId
from regrow.core.messages import facts, orders
from regrow.core.messages.vocabulary import Role, Warmth

FAMILY = """
import os, subprocess, time
subprocess.Popen(["sleep", "1000"])
subprocess.Popen(["sleep", "1000"], process_group=0)
if os.fork() == 0:
    time.sleep(1000)
print("family is up", flush=True)
time.sleep(1000)
"""


async def until(holds: Callable[[], bool], told: Callable[[], object]) -> None:
    """Wait until something holds; `told`: what is said where it does not."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, told()
        await asyncio.sleep(0.01)


async def shown(bench: Bench, text: str, times: int = 1) -> None:
    await until(lambda: bench.shown().count(text) >= times, lambda: (text, bench.shown(), bench.complaints()))


async def complained(bench: Bench, text: str) -> None:
    await until(lambda: text in bench.complaints(), lambda: (text, bench.complaints()))


async def children_are(bench: Bench, workers: set[int]) -> None:
    """Wait until the agent's children are these and its zygote: a fork takes a moment to be handed over."""

    def children() -> set[int]:
        return {child.pid for child in bench.children() if named(child.pid) not in ("", "regrow-zygote")}

    await until(lambda: children() == workers, lambda: (bench.children(), workers))


async def open_files(pid: int) -> set[int]:
    """Descriptors of a process, but for those that it opens for a moment."""
    looks = []
    for _ in range(20):
        looks.append({int(name) for name in os.listdir(f"/proc/{pid}/fd")})
        await asyncio.sleep(0.01)
    return set.intersection(*looks)


async def two_families(bench: Bench) -> None:
    """Two workers, each with a subprocess, one in a group of its own, and a fork."""
    for rank in range(2):
        await bench.spawn(f"w{rank}", rank=Rank(rank))
    await shown(bench, "family is up", times=2)
    bench.note_processes()
    assert len(bench.seen) >= 9


def never_ready(folder: Path) -> list[str]:
    """Imports that never come to an end in a zygote."""
    (folder / "endless.py").write_text("import time\nwhile True:\n    time.sleep(0.01)\n")
    return ["endless"]


async def test_an_agent_joins_before_its_zygote_is_ready(tmp_path: Path) -> None:
    async with agent(tmp_path, cold=True, preload=never_ready(tmp_path)) as bench:
        joined = bench.coordinator.all(facts.NodeJoined)[0]
        assert (joined.node, joined.slots, joined.host) == (NODE, 2, "127.0.0.1")
        modules = Path(f"/proc/{joined.pid}/maps").read_text()
        assert "libtorch" not in modules
        assert await bench.stop() == 0
        assert await bench.nothing_left() == []


async def test_workers_outlive_their_zygote_and_the_next_one_forks_more(tmp_path: Path) -> None:
    async with agent(tmp_path, FAMILY) as bench:
        first = await bench.spawn("w0")
        bench.zygote.kill()
        second = await bench.spawn("w1", rank=Rank(1))
        await children_are(bench, {first.pid, second.pid})
        await shown(bench, "family is up", times=2)
        bench.note_processes()
        bench.process.kill()  # the second zygote guards the workers of the first
        assert await bench.nothing_left() == []


async def test_a_zygote_killed_with_requests_on_its_desk_forks_each_worker_once(tmp_path: Path) -> None:
    async with agent(tmp_path) as bench:
        await bench.spawn("warm")
        for number in range(6):
            await bench.order_spawn(f"w{number}", rank=Rank(number % 2))
        bench.zygote.kill()
        for number in range(6):
            await bench.coordinator.expect(facts.WorkerStarted, worker=f"w{number}")
        started = [fact.pid for fact in bench.coordinator.all(facts.WorkerStarted)]
        assert len(started) == 7
        await children_are(bench, set(started))
        assert await bench.stop(grace=0.0) == 0
        assert await bench.nothing_left() == []


async def test_an_agent_without_descriptors_goes_on_and_spawns_when_there_are_some(tmp_path: Path) -> None:
    async with agent(tmp_path) as bench:
        first = await bench.spawn("w0")
        process = psutil.Process(bench.process.pid)
        soft, hard = process.rlimit(psutil.RLIMIT_NOFILE)
        log = bench.folder / "logs" / "rank0.log"
        await until(log.exists, lambda: log)  # it stays open
        taken = await open_files(process.pid)
        free = next(number for number in itertools.count() if number not in taken)
        for spare in range(9):  # of the descriptors that a worker needs here, each is the first that cannot be had
            process.rlimit(psutil.RLIMIT_NOFILE, (free + spare, hard))
            await bench.order_spawn(f"w{1 + spare}", rank=Rank(1), generation=Generation(1 + spare))
            await complained(bench, f"cannot start worker w{1 + spare}: ")
            await bench.coordinator.order(orders.FenceWorker(NODE, WorkerId(f"w{1 + spare}"), "not wanted"))
            await bench.coordinator.expect(facts.WorkerExited, worker=f"w{1 + spare}")
        assert await open_files(process.pid) == taken
        process.rlimit(psutil.RLIMIT_NOFILE, (free, hard))
        calling = asyncio.create_task(asyncio.to_thread(StoreClient, bench.coordinator.all(facts.NodeJoined)[0].store))
        await complained(bench, "has to wait: [Errno 24]")
        os.kill(first.pid, signal.SIGKILL)
        assert await exited(bench) == -signal.SIGKILL
        await bench.order_spawn("last", rank=Rank(1))
        await complained(bench, "cannot start worker last: ")
        process.rlimit(psutil.RLIMIT_NOFILE, (soft, hard))
        (await calling).close()
        second = await bench.coordinator.expect(facts.WorkerStarted, worker="last")
        await children_are(bench, {second.pid})
        assert [fact.worker for fact in bench.coordinator.all(facts.WorkerStarted)] == ["w0", "last"]


async def test_a_killed_agent_leaves_nothing(tmp_path: Path) -> None:
    async with agent(tmp_path, FAMILY) as bench:
        await two_families(bench)
        bench.process.kill()
        assert await bench.nothing_left() == []


async def test_an_agent_that_loses_its_coordinator_ends_everything(tmp_path: Path) -> None:
    async with agent(tmp_path, FAMILY) as bench:
        await two_families(bench)
        await bench.coordinator.hang_up()
        assert await asyncio.wait_for(bench.process.wait(), PATIENCE_S) == 1
        assert await bench.nothing_left() == []
        assert "connection to the coordinator was lost" in bench.complaints()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_a_second_signal_ends_everything(tmp_path: Path, number: signal.Signals) -> None:
    async with agent(tmp_path, FAMILY) as bench:
        await two_families(bench)
        bench.process.send_signal(number)  # the launcher, which may have had it too, is waited for
        await asyncio.sleep(0.2)
        assert bench.process.returncode is None
        bench.process.send_signal(number)
        assert await asyncio.wait_for(bench.process.wait(), PATIENCE_S) == 128 + number
        assert await bench.nothing_left() == []


ELASTIC = {"most_nodes": 2, "min_replicas": 1, "max_replicas": 4}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
async def test_the_first_signal_is_passed_on_as_a_notice_where_the_job_can_do_without_the_node(
    tmp_path: Path, number: signal.Signals
) -> None:
    async with agent(tmp_path, FAMILY, job=ELASTIC, drain_grace=20.0) as bench:
        await two_families(bench)
        bench.process.send_signal(number)
        notice = await bench.coordinator.expect(facts.NodeDraining)
        assert notice == facts.NodeDraining(NODE, 20.0, f"signal {number.name}")
        assert len(bench.children()) == 3, "it goes on until it is told to stop"
        assert await bench.stop() == 0
        assert await bench.nothing_left() == []


async def test_a_second_signal_ends_the_agent_at_once_and_so_does_the_end_of_its_grace(tmp_path: Path) -> None:
    (tmp_path / "second").mkdir()
    async with agent(tmp_path / "second", FAMILY, job=ELASTIC) as bench:
        bench.process.send_signal(signal.SIGUSR1)
        await bench.coordinator.expect(facts.NodeDraining)
        bench.process.send_signal(signal.SIGUSR1)
        await bench.coordinator.expect(facts.NodeStopped)  # which may be read after its end was seen
        assert await asyncio.wait_for(bench.process.wait(), PATIENCE_S) == 0
        assert isinstance(bench.coordinator.heard[-1][1], facts.NodeStopped)
    (tmp_path / "late").mkdir()
    async with agent(tmp_path / "late", FAMILY, job=ELASTIC, drain_grace=0.5) as bench:
        worker = await bench.spawn("w0")
        bench.process.send_signal(signal.SIGTERM)
        await bench.coordinator.expect(facts.NodeStopped)
        assert await asyncio.wait_for(bench.process.wait(), PATIENCE_S) == 0
        told = [
            fact
            for _, fact in bench.coordinator.heard
            if isinstance(fact, facts.NodeDraining | facts.WorkerExited | facts.NodeStopped)
        ]
        assert [type(fact) for fact in told] == [facts.NodeDraining, facts.WorkerExited, facts.NodeStopped], worker


async def test_an_agent_that_many_can_join_ends_with_its_parent_without_a_notice(tmp_path: Path) -> None:
    async with agent(tmp_path, FAMILY, job=ELASTIC, under_a_parent=True) as bench:
        await two_families(bench)
        bench.process.kill()
        assert await bench.nothing_left() == []
        assert bench.coordinator.all(facts.NodeDraining) == []


async def test_an_agent_ends_with_its_parent(tmp_path: Path) -> None:
    async with agent(tmp_path, FAMILY, under_a_parent=True) as bench:
        await two_families(bench)
        bench.process.kill()
        assert await bench.nothing_left() == []


async def test_stopping_a_node_gives_its_workers_the_grace_to_go(tmp_path: Path) -> None:
    source = """
    import os, signal, sys, time
    def leave(*_):
        print("saved", flush=True)
        sys.exit(9)
    stubborn = os.environ["RANK"] == "1"
    signal.signal(signal.SIGTERM, signal.SIG_IGN if stubborn else leave)
    print("up", flush=True)
    time.sleep(1000)
    """
    async with agent(tmp_path, source) as bench:
        for rank in range(2):
            await bench.spawn(f"w{rank}", rank=Rank(rank))
        await shown(bench, "up", times=2)
        began = time.monotonic()
        await bench.coordinator.order(orders.StopNode(NODE, "a test", 4.0))
        assert await exited(bench, "w0") == 9
        assert await exited(bench, "w1") == -signal.SIGKILL
        assert time.monotonic() - began >= 4.0
        await bench.coordinator.expect(facts.NodeStopped)
        assert isinstance(bench.coordinator.heard[-1][1], facts.NodeStopped)
        assert await asyncio.wait_for(bench.process.wait(), PATIENCE_S) == 0
        assert "[rank 0] saved\n" in bench.shown()
        assert await bench.nothing_left() == []


async def test_a_node_stopped_before_its_zygote_is_ready_still_answers_for_every_worker(tmp_path: Path) -> None:
    async with agent(tmp_path, preload=never_ready(tmp_path)) as bench:
        await bench.order_spawn("w0")
        assert await bench.stop() == 0
        assert len(bench.coordinator.all(facts.WorkerExited, worker="w0")) == 1
        assert await bench.nothing_left() == []


async def test_a_module_that_cannot_be_preloaded_is_named(tmp_path: Path) -> None:
    async with agent(tmp_path, preload=["no_such_module"]) as bench:
        for worker in ("w0", "w1"):
            await bench.order_spawn(worker)
            failed = await bench.coordinator.expect(facts.WorkerFailed, worker=worker)
            assert "no_such_module" in failed.error.message
            assert await exited(bench, worker) == 1
        assert await bench.stop() == 0


@pytest.mark.parametrize("wish", ["disable", "enable"])
async def test_whether_workers_collect_garbage_is_for_a_preloaded_module_to_say(tmp_path: Path, wish: str) -> None:
    (tmp_path / "wishing.py").write_text(f"import gc\nassert gc.isenabled()\ngc.{wish}()\n")
    async with agent(tmp_path, "import gc\nprint('collects', gc.isenabled())\n", preload=["wishing"]) as bench:
        await bench.spawn()
        assert await exited(bench) == 0
        assert f"collects {wish == 'enable'}" in bench.shown()
        assert await bench.stop() == 0


async def test_a_standby_with_imports_waits_for_its_rank_before_it_runs_the_script(tmp_path: Path) -> None:
    source = """
    import os
    from regrow.agent.workers.link import WorkerLink
    from regrow.core.config import WorkerEnv
    env = WorkerEnv.read()
    assert env == WorkerLink.current().env
    print("runs as", env.role, os.environ["RANK"], os.environ["LOCAL_RANK"], env.rank, env.generation, flush=True)
    from regrow.core.messages.facts import WorkerHalted
    WorkerLink.current().send(WorkerHalted(env.worker, 4, 1))
    """
    async with agent(tmp_path, source, job={"warmth": Warmth.IMPORTS}) as bench:
        await bench.spawn("s0", role=Role.STANDBY)
        ready = await bench.coordinator.expect(facts.WorkerReady, worker="s0")
        assert (ready.state_at, ready.endpoint, ready.layout) == (-1, "", "")
        await bench.spawn("s1", role=Role.STANDBY)
        await bench.coordinator.expect(facts.WorkerReady, worker="s1")
        assert "runs as" not in bench.shown()
        await bench.coordinator.order(orders.StartScript(WorkerId("s0"), Rank(1), 1, Generation(4)))
        await bench.coordinator.expect(facts.WorkerHalted, worker="s0")
        assert await exited(bench, "s0") == 0
        await shown(bench, "[rank 1] runs as joiner 1 1 1 4\n")
        assert await bench.stop() == 0
        assert await exited(bench, "s1") == -signal.SIGKILL, "its script has no handler of its own for SIGTERM"


async def test_a_module_runs_as_under_python_m(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    source = "import sys; from . import sibling; print(__name__, __package__, sys.argv[1:], sibling.x)"
    (package / "tool.py").write_text(source)
    (package / "sibling.py").write_text("x = 5\n")
    here = os.getcwd()
    os.chdir(tmp_path)
    try:
        async with agent(tmp_path, script=lambda _: Script("package.tool", ["a"], module=True)) as bench:
            await bench.spawn("w0")
            assert await exited(bench) == 0
            await shown(bench, "[rank 0] __main__ package ['a'] 5\n")
            assert await bench.stop() == 0
    finally:
        os.chdir(here)


async def test_a_binary_runs_with_the_same_environment(tmp_path: Path) -> None:
    def binary(_: Path) -> Script:
        return Script("sh", ["-c", "echo rank is $RANK; trap - PIPE; kill -TERM $$"], binary=True)

    async with agent(tmp_path, script=binary) as bench:
        await bench.spawn("w0", rank=Rank(1))
        assert await exited(bench) == -signal.SIGTERM
        await shown(bench, "[rank 1] rank is 1\n")
        assert await bench.stop() == 0


async def test_a_binary_that_does_not_exist_is_named(tmp_path: Path) -> None:
    async with agent(tmp_path, script=lambda _: Script("no-such-binary", [], binary=True)) as bench:
        await bench.spawn("w0")
        failed = await bench.coordinator.expect(facts.WorkerFailed, worker="w0")
        assert failed.error.type == "FileNotFoundError" and "no-such-binary" in failed.error.message
        assert await exited(bench) == 1
        assert await bench.stop() == 0


async def test_an_agent_without_configuration_says_so(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "regrow.agent",
        stdin=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        cwd=tmp_path,
    )
    _, complaints = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    assert process.returncode == 2
    assert complaints.decode().startswith("regrow agent: no configuration") and b"Traceback" not in complaints


async def test_a_refused_agent_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="the agent ended"):
        async with agent(tmp_path, token="wrong"):
            raise RuntimeError("it joined")
    complaints = (tmp_path / "stderr").read_text()
    assert "refused node n0" in complaints and textwrap.dedent(complaints).count("Traceback") == 0
