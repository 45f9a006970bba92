"""A coordinator for tests that orders what the test says and remembers what it hears; the agent under it is real."""

import asyncio
import json
import os
import signal
import socket
import sys
import tempfile
import textwrap
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import IO, Any, Self, TypeVar

import msgspec
import psutil
from aiohttp import WSMsgType, web
from tests.process.launching import named, warm
from tests.process.warm_client import WarmProcess

from regrow.core.config import AgentConfig, Script
from regrow.core.ids import Generation, JobId, NodeId, Rank, StepNo, WorkerId
from regrow.core.job import JobSpec
from regrow.core.messages import facts, orders
from regrow.core.messages.store import StoreHello, StoreReply
from regrow.core.messages.tables import GenerationTable, JoinGeneration, KeepTable, TableHead
from regrow.core.messages.unions import AgentFact
from regrow.core.messages.vocabulary import FaultSpec, Member, Role, Warmth, WorldChange
from regrow.core.net import sockets_home, unix_address
from regrow.core.records import StepCommitted
from regrow.core.wire import BlockingChannel, FrameCodec

NODE = NodeId("n0")
TOKEN = "a-token"
PATIENCE_S = 120.0

Wanted = TypeVar("Wanted")


class Coordinator:
    """The control plane's other end."""

    def __init__(self) -> None:
        self.heard: list[tuple[float, AgentFact]] = []
        self.refused = 0
        self.port = 0
        self.lost = False
        self.node_query = ""
        self._decoder = msgspec.msgpack.Decoder(AgentFact)
        self._encoder = msgspec.msgpack.Encoder()
        self._news = asyncio.Event()
        self._socket: web.WebSocketResponse | None = None
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_get("/agent", self._serve)
        self._runner = web.AppRunner(app, shutdown_timeout=0.2)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.refused += 1
            return web.Response(status=403)
        self.node_query = request.query.get("node", "")
        self._socket = web.WebSocketResponse()
        await self._socket.prepare(request)
        async for message in self._socket:
            assert message.type is WSMsgType.BINARY
            self.heard.append((time.monotonic(), self._decoder.decode(message.data)))
            self._news.set()
        self.lost = True
        self._news.set()
        return self._socket

    async def order(self, order: msgspec.Struct) -> None:
        assert self._socket is not None
        await self._socket.send_bytes(self._encoder.encode(order))

    async def hang_up(self) -> None:
        assert self._socket is not None and self._socket._req is not None
        transport = self._socket._req.transport
        assert transport is not None
        transport.abort()

    def all(self, kind: type[Wanted], **fields: Any) -> list[Wanted]:
        return [fact for _, fact in self.heard if isinstance(fact, kind) and _matches(fact, fields)]

    async def expect(self, kind: type[Wanted], within: float = PATIENCE_S, **fields: Any) -> Wanted:
        """The first fact of this kind with these fields, waited for."""
        deadline = time.monotonic() + within
        while not (found := self.all(kind, **fields)):
            assert not self.lost, f"the agent left before {kind.__name__} {fields} came"
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), max(0.01, deadline - time.monotonic()))
            except TimeoutError:
                raise AssertionError(f"no {kind.__name__} {fields} came; heard: {[f for _, f in self.heard]}") from None
        return found[0]

    def heard_at(self, fact: object) -> float:
        return next(at for at, heard in self.heard if heard is fact)


def _matches(fact: object, fields: dict[str, Any]) -> bool:
    fields = dict(fields)
    if (wanted := fields.pop("commits_of", None)) is not None:
        commits = fact.commits if isinstance(fact, facts.NodeProgress) else []
        if wanted not in [(commit.worker, commit.step) for commit in commits]:
            return False
    return all(getattr(fact, name) == value for name, value in fields.items())


class Bench:
    """An agent process under a test's coordinator."""

    def __init__(
        self, folder: Path, coordinator: Coordinator, process: "AgentProcess | asyncio.subprocess.Process"
    ) -> None:
        self.folder = folder
        self.coordinator = coordinator
        self.process = process
        self.seen: dict[int, psutil.Process] = {}
        self.tables = 0

    async def spawn(self, worker: str = "w0", **changes: Any) -> facts.WorkerStarted:
        await self.order_spawn(worker, **changes)
        started = await self.coordinator.expect(facts.WorkerStarted, worker=worker)
        self.note_processes()
        return started

    async def order_spawn(self, worker: str = "w0", **changes: Any) -> None:
        fields: dict[str, Any] = {
            "node": NODE,
            "worker": WorkerId(worker),
            "role": Role.RANK,
            "rank": Rank(0),
            "local_rank": 0,
            "world": 2,
            "generation": Generation(1),
            "restarts": 0,
            "resume": False,
        }
        await self.coordinator.order(orders.SpawnWorker(**(fields | changes)))

    async def form(
        self, worker: WorkerId, generation: Generation, rank: Rank, step: StepNo, change: WorldChange | None = None
    ) -> None:
        """A worker enters a generation; of the others there are only names."""
        self.tables += 1
        head = TableHead(generation, rank + 1, self.tables, step=step, change=change)
        names = [*(WorkerId(f"other{number}") for number in range(rank)), worker]
        members = [Member(Rank(number), name, NODE, 0, f"at {name}") for number, name in enumerate(names)]
        await self.coordinator.order(KeepTable(NODE, GenerationTable(head, [], members)))
        await self.coordinator.order(JoinGeneration(worker, rank, generation, self.tables))

    async def stop(self, grace: float = 1.0) -> int:
        await self.coordinator.order(orders.StopNode(NODE, "the test is over", grace))
        await self.coordinator.expect(facts.NodeStopped)
        return await asyncio.wait_for(self.process.wait(), PATIENCE_S)

    def note_processes(self) -> None:
        """Remember all processes under the agent, for `nothing_left`."""
        try:
            for process in psutil.Process(self.process.pid).children(recursive=True):
                self.seen[process.pid] = process
        except psutil.NoSuchProcess:
            return

    @property
    def zygote(self) -> psutil.Process:
        return next(child for child in self.children() if named(child.pid) == "regrow-zygote")

    def children(self) -> list[psutil.Process]:
        found: list[psutil.Process] = psutil.Process(self.process.pid).children()
        return found

    async def threads_at_rest(self) -> int:
        """Number of the agent's threads once it has its zygote alone, and none of them is busy with its own end."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            states = _states_of_threads(self.process.pid)
            if len(self.children()) == 1 and set(states) == {"S"}:
                return len(states)
            assert time.monotonic() < deadline, states
            await asyncio.sleep(0.005)

    async def nothing_left(self, within: float = 20.0) -> list[str]:
        """Processes of this bench that are still there at the deadline."""
        return await self.nothing_left_of(list(self.seen.values()), within)

    async def nothing_left_of(self, processes: list[psutil.Process], within: float = 20.0) -> list[str]:
        deadline = time.monotonic() + within
        while left := [process for process in processes if process.is_running()]:
            if time.monotonic() > deadline:
                return [str(process) for process in left]
            await asyncio.sleep(0.01)
        return []

    def log(self, name: str) -> str:
        return (self.folder / "logs" / name).read_text(errors="replace")

    def steps(self) -> list[StepCommitted]:
        path = self.folder / f"steps.{NODE}.jsonl"
        text = path.read_text() if path.exists() else ""
        lines = text.rpartition("\n")[0].splitlines()  # the last may be half written
        assert all("time" in json.loads(line) for line in lines)
        return [msgspec.json.decode(line, type=StepCommitted) for line in lines]

    def shown(self) -> str:
        return (self.folder / "stdout").read_text(errors="replace")

    def complaints(self) -> str:
        return (self.folder / "stderr").read_text(errors="replace")


def spec(**changes: Any) -> JobSpec:
    fields: dict[str, Any] = {
        "job": JobId("job-1"),
        "nproc": 2,
        "nodes": 1,
        "standbys": 0,
        "warmth": Warmth.BUILT,
        "max_faults": 5,
        "window": 3600.0,
        "max_restarts": 3,
        "durable": False,
    }
    return JobSpec(**(fields | changes))


def write_script(folder: Path, source: str, name: str = "script.py") -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(source))
    return path


@asynccontextmanager
async def agent(
    folder: Path,
    source: str = "import time\ntime.sleep(1000)\n",
    *,
    environment: dict[str, str] | None = None,
    script: Callable[[Path], Script] | None = None,
    job: dict[str, Any] | None = None,
    arguments: list[str] | None = None,
    under_a_parent: bool = False,
    cold: bool = False,
    **changes: Any,
) -> AsyncIterator[Bench]:
    """A running agent that has joined; whatever is left of it is killed at the end.

    Args:
        under_a_parent: it is the child of a process that can be killed.
        cold: it is started as users start it, which takes seconds, since its zygote imports torch.
    """
    path = write_script(folder, source)
    async with Coordinator() as coordinator:
        fields: dict[str, Any] = {
            "spec": spec(**(job or {})),
            "node": NODE,
            "node_rank": 0,
            "coordinator": f"http://127.0.0.1:{coordinator.port}",
            "token": TOKEN,
            "script": script(path) if script else Script(str(path), arguments or []),
            "job_dir": str(folder),
            "log_dir": str(folder / "logs"),
            "socket_dir": sockets_home(),
        }
        config = AgentConfig(**(fields | changes))
        variables = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as err:
            words = ["-c", _PARENT] if under_a_parent else ["-m", "regrow.agent"] if cold else []
            process = await _start(words, msgspec.json.encode(config), variables | (environment or {}), out, err)
        bench = Bench(folder, coordinator, process)
        try:
            await _joined(bench)
            yield bench
        finally:
            await _end(bench)


_PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-m', 'regrow.agent'])"


def _states_of_threads(pid: int) -> list[str]:
    """Letters as in `/proc/<pid>/stat`; S sleeps. One that ends meanwhile is left out."""
    states = []
    for name in os.listdir(f"/proc/{pid}/task"):
        with suppress(FileNotFoundError, ProcessLookupError):
            states.append(Path(f"/proc/{pid}/task/{name}/stat").read_text().rpartition(")")[2].split()[0])
    return states


class AgentProcess:
    """An agent forked from the warm process, with the part of `asyncio.subprocess.Process` that tests use."""

    def __init__(self, process: WarmProcess) -> None:
        self._process, self.pid = process, process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    async def wait(self) -> int:
        while (code := self._process.poll()) is None:
            await asyncio.sleep(0.005)
        return code

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()


async def _start(
    words: list[str], config: bytes, env: dict[str, str], out: IO[bytes], err: IO[bytes]
) -> "AgentProcess | asyncio.subprocess.Process":
    """An agent that reads this configuration: by these words to Python, or warm."""
    with tempfile.TemporaryFile() as stdin:
        stdin.write(config)
        stdin.seek(0)
        if words:
            return await asyncio.create_subprocess_exec(
                sys.executable, *words, stdin=stdin, stdout=out, stderr=err, env=env
            )
        streams = (stdin.fileno(), out.fileno(), err.fileno())
        return AgentProcess(warm().start("regrow.agent", [], cwd=os.getcwd(), env=env, streams=streams))


async def _joined(bench: Bench) -> None:
    joining = asyncio.create_task(bench.coordinator.expect(facts.NodeJoined))
    ending = asyncio.create_task(bench.process.wait())
    await asyncio.wait({joining, ending}, return_when=asyncio.FIRST_COMPLETED)
    if not joining.done():
        joining.cancel()
        raise AssertionError(f"the agent ended: {bench.complaints()}")
    ending.cancel()


async def _end(bench: Bench) -> None:
    bench.note_processes()
    if bench.process.returncode is None:
        bench.process.send_signal(signal.SIGKILL)
        await bench.process.wait()
    for process in bench.seen.values():
        if process.is_running():
            process.kill()


async def exited(bench: Bench, worker: str = "w0") -> int:
    return (await bench.coordinator.expect(facts.WorkerExited, worker=worker)).code


def fault(rank: int, **changes: Any) -> FaultSpec:
    return FaultSpec(fault="f1", rank=Rank(rank), **changes)


class StoreClient:
    """A blocking client of the store, as a worker has one."""

    def __init__(self, address: str, token: str = TOKEN) -> None:
        kind, _, place = address.partition(":")
        if kind == "unix":
            self.sock = socket.socket(socket.AF_UNIX)
            self.sock.connect(unix_address(place))
        else:
            host, _, port = place.rpartition(":")
            self.sock = socket.create_connection((host, int(port)))
        codec: FrameCodec[StoreReply] = FrameCodec(StoreReply)
        self._channel = BlockingChannel(self.sock, codec)
        self._replies = self._channel.messages()
        self.greeting = self.ask(StoreHello(token))

    def ask(self, request: msgspec.Struct) -> StoreReply | None:
        self._channel.send(request)
        return next(self._replies, None)

    def close(self) -> None:
        self._channel.close()
