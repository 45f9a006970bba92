"""Workers under a real agent and a real zygote. One agent serves the whole module: a zygote costs seconds."""

import asyncio
import itertools
import json
import os
import signal
import statistics
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
from tests.process.agent_harness import NODE, PATIENCE_S, TOKEN, Bench, agent, exited, fault

from regrow.core.ids import Generation, Rank, StepNo, WorkerId
from regrow.core.messages import facts, orders
from regrow.core.messages.observations import NodeSeen, WorkerObservation
from regrow.core.messages.vocabulary import FaultHow, Role
from regrow.core.phase import Phase

pytestmark = pytest.mark.asyncio(loop_scope="module")
_ranks = itertools.count(10)

# The script does what the file of its rank says.
SCRIPT = """
import os, sys
path = sys.path[0] + "/part" + os.environ["RANK"] + ".py"
exec(compile(open(path).read(), path, "exec"), globals())
"""

LINK = """
import os, signal, sys, time
from regrow.agent.workers.link import WorkerLink
from regrow.core.phase import Phase
from regrow.core.messages.facts import *
from regrow.core.messages.orders import *
link = WorkerLink.current()
me = link.env.worker
def committed(step, generation=1):
    return WorkerCommitted(me, generation, step, time.monotonic(), 0.01, {"loss": step / 2})
"""

WAIT = "\nprint('waiting', flush=True)\nimport time\ntime.sleep(1000)\n"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Bench]:
    folder = tmp_path_factory.mktemp("agent")
    async with agent(
        folder,
        SCRIPT,
        arguments=["--local=${local_rank}", "x y"],
        environment={"OF_THE_USER": "1"},
        job={"hang_timeout": 0.6},
    ) as running:
        yield running
        assert await running.stop() == 0
        assert await running.nothing_left() == []


class Part:
    """One worker with a script of its own."""

    def __init__(self, bench: Bench, source: str) -> None:
        self.bench = bench
        self.rank = next(_ranks)
        self.id = WorkerId(f"w{self.rank}")
        self.path = bench.folder / f"part{self.rank}.py"
        self.path.write_text(textwrap.dedent(source))

    async def start(self, **changes: Any) -> "Part":
        self.pid = (await self.bench.spawn(self.id, rank=Rank(self.rank), **changes)).pid
        return self

    async def code(self) -> int:
        return await exited(self.bench, self.id)

    async def says(self, text: str, where: str | None = None) -> None:
        """Wait until it has printed this."""
        deadline = time.monotonic() + PATIENCE_S
        name = where or f"rank{self.rank}.log"
        while text not in (self.log(name)):
            assert time.monotonic() < deadline, f"{text!r} is not in {self.log(name)!r}"
            await _tick(self.bench)

    def log(self, name: str | None = None) -> str:
        path = self.bench.folder / "logs" / (name or f"rank{self.rank}.log")
        return path.read_text(errors="replace") if path.exists() else ""

    async def kill(self) -> None:
        await self.bench.coordinator.order(orders.FenceWorker(NODE, self.id, "the test is done with it"))
        await self.code()


async def _tick(_: Bench) -> None:
    await asyncio.sleep(0.01)


async def until(holds: Callable[[], bool], within: float = 20.0) -> None:
    deadline = time.monotonic() + within
    while not holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


async def start(bench: Bench, source: str, **changes: Any) -> Part:
    return await Part(bench, source).start(**changes)


async def test_a_worker_sees_what_torchrun_promises(bench: Bench) -> None:
    part = await start(
        bench,
        """
        import json, os, signal, sys
        import __main__
        import torch
        print(json.dumps({"env": dict(os.environ), "argv": sys.argv, "path": sys.path[0], "name": __name__,
            "main": __main__.__file__, "threads": torch.get_num_threads(), "group": os.getpgid(0) == os.getpid(),
            "parent": os.getppid(), "mask": len(signal.pthread_sigmask(0, [])), "stdin": os.read(0, 1).decode()}))
        """,
        local_rank=1,
        restarts=2,
    )
    assert await part.code() == 0
    await part.says("ended with code 0")
    told = json.loads(next(line for line in part.log().splitlines() if line.startswith("{")))
    env = told["env"]
    expected = {
        "RANK": str(part.rank),
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_RANK": str(part.rank),
        "ROLE_WORLD_SIZE": "2",
        "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_RUN_ID": "job-1",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "OMP_NUM_THREADS": "1",
        "OF_THE_USER": "1",
        "REGROW_JOB": "job-1",
    }
    assert {name: env.get(name) for name in expected} == expected
    assert int(env["MASTER_PORT"]) > 0
    added = set(env) - set(os.environ) - set(expected)
    assert added <= {"MASTER_PORT", "REGROW_WORKER_ENV", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "LC_CTYPE"}
    script = bench.folder / "script.py"
    assert told["argv"] == [str(script), "--local=1", "x y"]
    assert (told["path"], told["main"], told["name"]) == (str(bench.folder), str(script), "__main__")
    assert (told["threads"], told["group"], told["mask"], told["stdin"]) == (1, True, 0, "")
    assert told["parent"] == bench.process.pid


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("", 0),
        ("import sys; sys.exit(3)", 3),
        ("import sys; sys.exit()", 0),
        ("import sys; sys.exit('a last word')", 1),
        ("import os; os._exit(7)", 7),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("import os; os.abort()", -signal.SIGABRT),
    ],
)
async def test_exit_codes_are_those_of_the_script(bench: Bench, source: str, code: int) -> None:
    part = await start(bench, source)
    assert await part.code() == code
    assert bench.coordinator.all(facts.WorkerFailed, worker=part.id) == []
    if "last word" in source:
        await part.says("a last word\n")


async def test_an_exception_is_told_once_with_its_place_and_not_printed(bench: Bench) -> None:
    part = await start(bench, "def f():\n    raise ValueError('no luck')\nf()\n")
    assert await part.code() == 1
    failed = await bench.coordinator.expect(facts.WorkerFailed, worker=part.id)
    assert (failed.error.type, failed.error.message, failed.step) == ("ValueError", "no luck", -1)
    assert failed.error.where == f"{part.path}:2"
    assert "regrow/agent" not in failed.error.traceback and "runpy" not in failed.error.traceback
    await part.says("ended with code 1")
    assert "ValueError: no luck" in part.log()
    assert "no luck" not in bench.shown() + bench.complaints()
    kinds = [type(fact) for _, fact in bench.coordinator.heard if getattr(fact, "worker", None) == part.id]
    assert kinds == [facts.WorkerStarted, facts.WorkerFailed, facts.WorkerExited]


async def test_what_a_script_leaves_for_its_end_still_happens(bench: Bench) -> None:
    part = await start(
        bench,
        """
        import atexit, threading, time
        word = "and exit handlers see the script's names"
        atexit.register(lambda: print(word))
        def later():
            time.sleep(0.05)
            print("threads are waited for")
        threading.Thread(target=later).start()
        """,
    )
    assert await part.code() == 0
    await part.says("threads are waited for\nand exit handlers see the script's names\n")


async def test_processes_spawned_by_a_script_find_its_functions(bench: Bench) -> None:
    # Straight from the script's own file, as `spawn` imports that.
    part = Part(bench, "if __name__ == '__main__': raise SystemExit(helper_main())")
    script = bench.folder / "script.py"
    kept = script.read_text()
    script.write_text(
        textwrap.dedent(
            """
            import multiprocessing
            def double(queue, number):
                queue.put(number * 2)
            if __name__ == "__main__":
                context = multiprocessing.get_context("spawn")
                queue = context.SimpleQueue()
                process = context.Process(target=double, args=(queue, 21))
                process.start()
                print("answer", queue.get())
                process.join()
            """
        )
    )
    try:
        await part.start()
        assert await part.code() == 0
    finally:
        script.write_text(kept)
    await part.says("answer 42")


async def test_workers_draw_different_numbers_and_run_one_thread(bench: Bench) -> None:
    source = "import numpy, random, threading, os\nprint('drawn', numpy.random.rand(), random.random())"
    parts = [await start(bench, source) for _ in range(2)]
    for part in parts:
        assert await part.code() == 0
        await part.says("drawn")
    lines = [next(line for line in part.log().splitlines() if line.startswith("drawn")).split() for part in parts]
    assert lines[0][1] != lines[1][1] and lines[0][2] != lines[1][2]


async def test_nothing_but_channel_and_board_is_inherited(bench: Bench) -> None:
    part = await start(
        bench,
        """
        import os
        found = sorted(os.readlink(f"/proc/self/fd/{n}").split(":")[0] for n in os.listdir("/proc/self/fd")
                       if os.path.islink(f"/proc/self/fd/{n}"))
        print("open", found)
        """,
    )
    assert await part.code() == 0
    await part.says("open")
    # A mapped memory file keeps a descriptor of its own, and the board is mapped twice.
    assert "open ['/dev/null', '/memfd', '/memfd', '/memfd', 'pipe', 'pipe', 'socket']" in part.log()


async def test_what_a_killed_worker_started_is_ended_and_reaped(bench: Bench) -> None:
    part = await start(
        bench,
        """
        import os, subprocess, time
        first = subprocess.Popen(["sleep", "1000"])
        second = subprocess.Popen(["sh", "-c", "sleep 1000 & exec sleep 1000"], process_group=0)
        if os.fork() == 0:
            time.sleep(1000)
        print("started", first.pid, second.pid, flush=True)
        time.sleep(1000)
        """,
    )
    await part.says("started")
    await until(lambda: len(psutil.Process(part.pid).children(recursive=True)) == 4)
    family = psutil.Process(part.pid).children(recursive=True)
    bench.note_processes()
    os.kill(part.pid, signal.SIGKILL)
    assert await part.code() == -signal.SIGKILL
    assert await bench.nothing_left_of(family) == []
    # The news of its death may come before it can be reaped.
    await until(lambda: [child.pid for child in bench.children()] == [bench.zygote.pid])


async def test_what_an_ended_worker_left_running_is_ended_too(bench: Bench) -> None:
    part = await start(bench, "import subprocess\nprint('left', subprocess.Popen(['sleep', '1000']).pid)")
    assert await part.code() == 0
    await part.says("left")
    pid = int(part.log().split("left ")[1].split()[0])
    deadline = time.monotonic() + PATIENCE_S
    while psutil.pid_exists(pid):
        assert time.monotonic() < deadline
        await _tick(bench)


async def test_the_last_words_of_a_killed_worker_come_before_the_news_of_its_death(bench: Bench) -> None:
    part = await start(
        bench,
        LINK
        + """
for step in range(500):
    link.send(committed(step))
link.send(WorkerHalted(me, 1, 500))
os.kill(os.getpid(), signal.SIGKILL)
""",
    )
    assert await part.code() == -signal.SIGKILL
    mine = [fact for _, fact in bench.coordinator.heard if getattr(fact, "worker", None) == part.id]
    assert [type(fact) for fact in mine] == [
        facts.WorkerStarted,
        facts.WorkerCommitted,
        facts.WorkerHalted,
        facts.WorkerExited,
    ]
    assert isinstance(mine[1], facts.WorkerCommitted) and mine[1].step == 0
    await bench.coordinator.expect(facts.NodeProgress, commits_of=(part.id, 499))
    deadline = time.monotonic() + PATIENCE_S
    while len(lines := [line for line in bench.steps() if line.worker == part.id]) < 500:
        assert time.monotonic() < deadline
        await _tick(bench)
    assert [line.step for line in lines] == list(range(500))
    assert all(line.rank == part.rank for line in lines)


async def test_only_the_first_commit_of_each_generation_is_told_at_once(bench: Bench) -> None:
    part = await start(
        bench,
        LINK
        + "\nfor step in range(6):\n    link.send(committed(step, 1 + step // 3))\nlink.send(WorkerFinished(me, 2, 6))",
    )
    await part.code()
    assert [fact.step for fact in bench.coordinator.all(facts.WorkerCommitted, worker=part.id)] == [0, 3]


@pytest.mark.parametrize(
    "says", ["link.send(WorkerHalted('w-other', 1, 1))", "os.write(link.env.channel, b'\\0\\0\\0\\3abc')"]
)
async def test_a_worker_that_lies_or_talks_nonsense_is_ended(bench: Bench, says: str) -> None:
    part = await start(bench, LINK + says + "\ntime.sleep(1000)")
    assert await part.code() == -signal.SIGKILL
    assert bench.coordinator.all(facts.WorkerHalted, worker="w-other") == []
    assert f"worker {part.id}" in bench.complaints()


async def test_orders_reach_the_worker_and_its_answers_the_coordinator(bench: Bench) -> None:
    part = await start(
        bench,
        LINK
        + """
link.send(WorkerReady(me, 3, "unix:/e", "digest"))
for order in link.orders():
    break
for again in link.orders():
    break
link.send(WorkerHalted(me, order.generation, again.generation))
""",
    )
    await bench.coordinator.expect(facts.WorkerReady, worker=part.id, endpoint="unix:/e")
    for generation in (5, 6):
        await bench.coordinator.order(orders.HaltGeneration(part.id, Generation(generation), "test"))
    await bench.coordinator.expect(facts.WorkerHalted, worker=part.id, generation=5, state_at=6)
    assert await part.code() == 0


async def test_a_subprocess_of_a_worker_has_no_link(bench: Bench) -> None:
    part = await start(
        bench,
        LINK
        + f"""
import subprocess
code = "from regrow.agent.workers.link import WorkerLink; print('link', WorkerLink.current(), flush=True)"
subprocess.run([{sys.executable!r}, "-c", code], check=True)
if os.fork() == 0:
    print("fork", WorkerLink.current(), flush=True)
    os._exit(0)
os.wait()
""",
    )
    assert await part.code() == 0
    await part.says("link None")
    await part.says("fork None")


async def test_a_stopped_worker_can_be_fenced_and_its_stacks_are_kept_not_shown(bench: Bench) -> None:
    stopped = await start(bench, "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)")
    busy = await start(bench, "def deep_in_the_script():" + textwrap.indent(WAIT, "    ") + "deep_in_the_script()")
    await busy.says("waiting")
    for part in (stopped, busy):
        await bench.coordinator.order(orders.FenceWorker(NODE, part.id, "a test", dump_stacks=True))
        assert await part.code() == -signal.SIGKILL
    await busy.says("in deep_in_the_script")
    assert "deep_in_the_script" not in bench.shown() + bench.complaints()


@pytest.mark.parametrize("how", [FaultHow.SIGKILL, FaultHow.SIGSTOP])
async def test_a_fault_on_demand_is_told_before_it_strikes(bench: Bench, how: FaultHow) -> None:
    part = await start(bench, LINK + "link.board.enter(Phase.WAITING, step=4, generation=1)" + WAIT)
    await part.says("waiting")
    await bench.coordinator.order(orders.ArmFault(part.id, fault(part.rank, how=how)))
    fired = await bench.coordinator.expect(facts.FaultFired, worker=part.id)
    assert (fired.fault, fired.step) == ("f1", 4)
    if how is FaultHow.SIGKILL:
        assert await part.code() == -signal.SIGKILL
        gone = bench.coordinator.all(facts.WorkerExited, worker=part.id)[0]
        assert bench.coordinator.heard_at(fired) <= bench.coordinator.heard_at(gone) and fired.at <= gone.at
    else:
        deadline = time.monotonic() + PATIENCE_S
        while psutil.Process(part.pid).status() != psutil.STATUS_STOPPED:
            assert time.monotonic() < deadline
        await part.kill()


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize(("before", "step", "counted"), [(20, 8, True), (24, 7, False)])
async def test_metrics_of_a_dead_worker_count_if_its_step_does(
    bench: Bench, before: int, step: int, counted: bool, elsewhere: bool
) -> None:
    before += 2 * elsewhere
    dead = await start(
        bench,
        LINK
        + f"link.send(committed(6, {before}))\nlink.send(WorkerStaged(me, {before}, 7, {{'loss': 9.0}}))\n"
        + "os.kill(os.getpid(), 9)",
        generation=Generation(before),
    )
    await dead.code()
    heir = await start(bench, WAIT)
    following = Generation(before + 1)
    if elsewhere:
        await bench.coordinator.order(orders.NoteGeneration(NODE, following, StepNo(step)))
    else:
        await bench.form(heir.id, following, Rank(heir.rank), StepNo(step))
    # Anything after the order shows that it was carried out, and the flush follows within 0.2 s.
    await heir.kill()
    after = await start(bench, LINK + "link.send(committed(0))")
    await after.code()
    deadline = time.monotonic() + PATIENCE_S
    while not [line for line in bench.steps() if line.worker == after.id]:
        assert time.monotonic() < deadline
        await _tick(bench)
    lines = [(line.step, line.adopted, line.metrics) for line in bench.steps() if line.worker == dead.id]
    assert lines == [(6, False, {"loss": 3.0})] + ([(7, True, {"loss": 9.0})] if counted else [])


async def test_workers_that_stand_still_are_told_with_what_is_seen_of_them(bench: Bench) -> None:
    def stuck(calls: int, flight: str) -> str:
        return (
            LINK
            + "link.board.enter(Phase.COMPUTING, step=3, generation=1)\n"
            + f"[link.board.call() for _ in range({calls})]\nlink.board.show_flight({flight})"
            + WAIT
        )

    culprit = await start(bench, stuck(2, "0, ''"))
    await culprit.says("waiting")
    waiting = await start(bench, stuck(5, "1, 'allreduce on w'"))

    async def sights(done: Callable[[dict[WorkerId, WorkerObservation]], bool]) -> dict[WorkerId, WorkerObservation]:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            seen = bench.coordinator.all(NodeSeen)
            known = {sight.worker: sight for sight in seen[-1].observations} if seen else {}
            if len(known) == 2 and done(known):
                return known
            assert time.monotonic() < deadline, known
            await _tick(bench)

    known = await sights(lambda known: all(sight.seconds > 0.6 for sight in known.values()))
    assert [(known[w.id].calls, known[w.id].waits) for w in (culprit, waiting)] == [(2, False), (5, True)]
    assert known[waiting.id].awaits == "allreduce on w"
    assert {(s.generation, s.step, s.phase, s.stopped) for s in known.values()} == {(1, 3, Phase.COMPUTING, False)}
    os.kill(waiting.pid, signal.SIGSTOP)
    await sights(lambda known: known[waiting.id].stopped and not known[culprit.id].stopped)
    await culprit.kill()
    await waiting.kill()


async def test_a_standby_is_quiet_until_it_takes_a_rank(bench: Bench) -> None:
    part = await start(
        bench, LINK + "print('warming up')\nfor order in link.orders(): break\nprint('at work')", role=Role.STANDBY
    )
    await part.says("warming up", f"standby-{part.id}.log")
    assert not (bench.folder / f"logs/rank{part.rank}.log").exists()
    await bench.form(part.id, Generation(30), Rank(part.rank), StepNo(0))
    assert await part.code() == 0
    await part.says("at work\n")
    assert f"[rank {part.rank}] at work\n" in bench.shown() and "warming up" not in bench.shown()


async def test_stdout_and_stderr_go_where_they_belong(bench: Bench) -> None:
    part = await start(
        bench, "import sys\nprint('to out')\nprint('to err', file=sys.stderr)\nprint('tail', end='', flush=True)"
    )
    assert await part.code() == 0
    await part.says("ended with code 0")
    # The files and what the agent prints itself are written one after the other.
    await until(lambda: f"[rank {part.rank}] to out\n[rank {part.rank}] tail\n" in bench.shown())
    await until(lambda: f"[rank {part.rank}] to err\n" in bench.complaints())
    assert "to out\n" in part.log() and "to err\n" in part.log()
    assert "\n=== " in part.log().split("tail")[1]
    assert part.log().startswith("=== ")


async def test_a_fork_and_the_news_of_a_death_take_milliseconds(
    bench: Bench, record_property: Callable[[str, object], None]
) -> None:
    forks, deaths = [], []
    for _ in range(8):
        part = Part(bench, WAIT)
        began = time.monotonic()
        await part.start()
        forks.append(time.monotonic() - began)
        await part.says("waiting")
        struck = time.monotonic()
        os.kill(part.pid, signal.SIGKILL)
        gone = await bench.coordinator.expect(facts.WorkerExited, worker=part.id)
        deaths.append(bench.coordinator.heard_at(gone) - struck)
        assert gone.at - struck >= 0
    fork, death = min(forks), min(deaths)  # what it takes where nothing else comes between
    record_property("fork_ms", fork * 1e3)
    record_property("death_to_news_ms", death * 1e3)
    assert fork < 0.3 and death < 0.1  # loose: other tests may run beside this one


async def test_the_news_of_a_death_does_not_wait_for_the_dead_workers_memory(bench: Bench) -> None:
    gains = []
    idle = await bench.threads_at_rest()  # of one that is not reaped yet there is still a thread
    for _ in range(4):
        part = await start(bench, "import torch\nx = torch.ones(64 << 20)" + WAIT)
        await part.says("waiting")
        # One more waits for the worker's death.
        await until(lambda: psutil.Process(bench.process.pid).num_threads() == idle + 1)
        os.kill(part.pid, signal.SIGKILL)
        assert await part.code() == -signal.SIGKILL
        gone = bench.coordinator.all(facts.WorkerExited, worker=part.id)[0]
        while psutil.pid_exists(part.pid):
            time.sleep(0.0001)
        gains.append(time.monotonic() - bench.coordinator.heard_at(gone))
    assert statistics.median(gains) > 0.002  # giving back 256 MB takes ten times as long


async def test_an_agent_does_not_grow_with_the_workers_it_buries(bench: Bench) -> None:
    process = psutil.Process(bench.process.pid)
    idle = await bench.threads_at_rest()

    async def bury(count: int) -> None:
        for _ in range(count):
            await (await start(bench, WAIT)).kill()
        await until(lambda: process.num_threads() == idle and len(process.children(recursive=True)) == 1)

    await bury(3)
    before = process.num_fds()
    await bury(15)
    await until(lambda: process.num_fds() <= before)


async def test_the_token_stands_in_no_command_line(bench: Bench) -> None:
    for pid in [bench.process.pid, bench.zygote.pid]:
        assert TOKEN not in Path(f"/proc/{pid}/cmdline").read_text()
    assert bench.coordinator.node_query == NODE
