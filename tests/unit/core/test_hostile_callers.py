"""Requests that no part of the job would send, with the token and without: closed, counted, and no harm done."""

import asyncio
import gc
import random
import resource
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import psutil
import pytest
import torch
from tests.unit.agent.test_agent_environment import config
from tests.unit.membership.test_coordinator import FACTS, ScriptedMachine

from regrow.agent.state_copies.server import CopyServer
from regrow.agent.state_copies.versions import CopyVersions
from regrow.agent.store.server import StoreServer
from regrow.comm.links import Links, Site
from regrow.core import strangers
from regrow.core.ids import Generation, Rank, StepNo
from regrow.core.messages.copy_transfer import AskCopy, CopyHello
from regrow.core.messages.store import StoreAdd, StoreDelete, StoreGet, StoreHello, StoreMultiGet, StoreSet, StoreWait
from regrow.core.net import connect
from regrow.core.wire import FrameCodec
from regrow.hydration.inventory import Inventory, StateSource
from regrow.hydration.messages import AskState, SendSpans
from regrow.hydration.plan import ByteSpan
from regrow.hydration.server import HydrationServer
from regrow.membership.server.coordinator import Coordinator

TOKEN = "the job's token"
PATIENCE = 60.0
LARGEST_GROWTH = 48 << 20
_LENGTH = struct.Struct(">I")

Frame = Callable[[random.Random], msgspec.Struct]
_codec: FrameCodec[Any] = FrameCodec(StoreGet)


def framed(body: bytes) -> bytes:
    return _LENGTH.pack(len(body)) + body


def flipped(frame: bytes, rng: random.Random) -> bytes:
    """With some bits the other way round, its length left as it is: else it is one more random length."""
    changed = bytearray(frame)
    for _ in range(rng.randint(1, 8)):
        changed[rng.randrange(4, len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def hostile(rng: random.Random, hello: bytes, requests: list[Frame]) -> bytes:
    """Bytes of one hostile caller."""
    known = hello if rng.random() < 0.5 else b""
    request = _codec.frame(rng.choice(requests)(rng))
    match rng.randrange(7):
        case 0:
            return known + rng.randbytes(rng.randint(1, 4096))
        case 1:
            return known + framed(rng.randbytes(rng.randint(0, 512)))
        case 2:
            return known + flipped(request, rng)
        case 3:
            return known + _LENGTH.pack(rng.randint((64 << 20) + 1, (1 << 32) - 1)) + rng.randbytes(512)
        case 4:  # announced, and never said whole
            return known + _LENGTH.pack(rng.randint(1 << 10, 64 << 20)) + rng.randbytes(rng.randint(0, 1000))
        case 5:
            return known + framed(b"\x91" * rng.randint(1, 30_000))  # lists in lists in lists
        case _:
            return known + request[: rng.randrange(1, len(request))]


def number(rng: random.Random) -> int:
    return rng.choice([0, -1, 1, 2**31, 2**63 - 1, -(2**63), rng.getrandbits(40)])


def text(rng: random.Random) -> str:
    return rng.choice(["", "k", "../../etc/passwd", "\x00", "é" * 300, "k" * 5000])


STORE: list[Frame] = [
    lambda rng: StoreSet(text(rng), rng.randbytes(rng.randint(0, 2000)), ask=number(rng)),
    lambda rng: StoreAdd(text(rng), number(rng), ask=number(rng)),
    lambda rng: StoreGet(text(rng), rng.choice([-1.0, 0.0, float("nan"), float("inf")]), ask=number(rng)),
    lambda rng: StoreMultiGet([text(rng)] * 50, 0.0, ask=number(rng)),
    lambda rng: StoreWait([text(rng)], -5.0, ask=number(rng)),
    lambda rng: StoreDelete(text(rng), ask=number(rng)),
]
HYDRATION: list[Frame] = [
    lambda rng: AskState(TOKEN, Generation(number(rng)), StepNo(number(rng)), rng.choice([0.0, -1.0, 0.01])),
    lambda rng: SendSpans([ByteSpan("weight", number(rng), number(rng))], number(rng)),
    lambda rng: SendSpans([ByteSpan(text(rng), 0, 4)], 1 << 20),
]
COPIES: list[Frame] = [lambda rng: AskCopy(Rank(number(rng)), StepNo(number(rng)))]


class Weights:
    """A state of one tensor, at step 3."""

    def inventory(self, step: StepNo) -> Inventory:
        raise AssertionError("nobody asks for generation 1 and step 3")

    def tensor(self, name: str) -> torch.Tensor:
        raise AssertionError(name)


class Held:
    """Threads and descriptors of this process, and its memory, at one moment."""

    def __init__(self) -> None:
        me = psutil.Process()
        gc.collect()
        self.counts = (threading.active_count(), me.num_fds())
        self.memory = me.memory_info().rss

    def exceeds(self, before: "Held") -> bool:
        """True if there are more threads or descriptors than before."""
        return any(now > then for now, then in zip(self.counts, before.counts, strict=True))

    def assert_no_more_than(self, before: "Held") -> None:
        """No thread and no descriptor more, and hardly more memory."""
        assert not self.exceeds(before), f"{self.counts} threads and descriptors, and {before.counts} before"
        assert self.memory - before.memory < LARGEST_GROWTH


@contextmanager
def harmless() -> Iterator[None]:
    """Check that the code inside leaves as many threads and descriptors as there were, and hardly more memory."""
    before = Held()
    yield
    deadline = time.monotonic() + PATIENCE
    while Held().exceeds(before) and time.monotonic() < deadline:
        time.sleep(0.02)
    Held().assert_no_more_than(before)


@asynccontextmanager
async def harmless_to_a_loop() -> AsyncIterator[None]:
    """As `harmless`, where the server is in this event loop: it is done with its last callers meanwhile."""
    before = Held()
    yield
    deadline = time.monotonic() + PATIENCE
    while Held().exceeds(before) and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    Held().assert_no_more_than(before)


def call(endpoint: str, said: bytes) -> None:
    """One caller, who says that and leaves, having heard what is answered at once."""
    with connect(endpoint, PATIENCE) as sock, suppress(ConnectionError):
        sock.sendall(said)
        sock.settimeout(0.002)
        with suppress(TimeoutError):
            while sock.recv(1 << 16):
                pass


def storm(endpoint: str, hello: msgspec.Struct, requests: list[Frame], count: int) -> None:
    rng = random.Random(f"{endpoint[:4]}{count}")
    greeting = _codec.frame(hello)
    for _ in range(count):
        call(endpoint, hostile(rng, greeting, requests))


async def one_thread(endpoint: str) -> None:
    """Have one thread for all that is called from a loop, and let it make its first call."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    await asyncio.to_thread(call, endpoint, b"")


COUNTS = [200, pytest.param(2000, marks=pytest.mark.full)]


@pytest.mark.parametrize("count", COUNTS)
async def test_the_store(tmp_path: Path, count: int) -> None:
    before = strangers.refused.counts.get("store", 0)
    async with StoreServer(config(job={"nodes": 2}, token=TOKEN, socket_dir=str(tmp_path))) as server:
        await one_thread(server.address)
        async with harmless_to_a_loop():
            await asyncio.to_thread(storm, server.address, StoreHello(TOKEN), STORE, count)
        reader, writer = await asyncio.open_connection(*server.address.removeprefix("tcp:").split(":"))
        writer.write(_codec.frame(StoreHello(TOKEN)) + _codec.frame(StoreSet("mine", b"1", ask=7)))
        assert len(await asyncio.wait_for(reader.read(100), PATIENCE)) > 8
        writer.close()
    assert strangers.refused.counts["store"] - before > count / 4


@pytest.mark.parametrize("count", COUNTS)
def test_state_for_newcomers(tmp_path: Path, count: int) -> None:
    before = strangers.refused.counts.get("hydrate", 0)
    source: StateSource = Weights()
    with HydrationServer(source, token=TOKEN, socket_dir=tmp_path, nodes=2) as server:
        server.offer(Generation(1), StepNo(3))
        with harmless():
            hello = AskState(TOKEN, Generation(0), StepNo(0), 0.0)
            storm(server.endpoint, hello, HYDRATION, count)
        deadline = time.monotonic() + PATIENCE
        while server.readers and time.monotonic() < deadline:  # the last one may have waited to be let in
            time.sleep(0.02)
        assert server.readers == 0
        with connect(server.endpoint, PATIENCE) as sock:
            sock.sendall(_codec.frame(hello))
            assert b"StateRefused" in sock.recv(1 << 12), "it still answers"
    assert strangers.refused.counts["hydrate"] - before > count / 4


@pytest.mark.parametrize("count", COUNTS)
def test_copies_of_state(tmp_path: Path, count: int) -> None:
    before = strangers.refused.counts.get("copies", 0)
    server = CopyServer(CopyVersions(), token=TOKEN, folder=None, bind="127.0.0.1", advertise="127.0.0.1")
    endpoint = server.open()
    try:
        with harmless():
            storm(endpoint, CopyHello(TOKEN), COPIES, count)
        with connect(endpoint, PATIENCE) as sock:
            sock.sendall(_codec.frame(CopyHello(TOKEN)) + _codec.frame(AskCopy(Rank(0), StepNo(0))))
            assert b"CopyRefused" in sock.recv(1 << 12)
    finally:
        server.close()
    assert strangers.refused.counts["copies"] - before > count / 4


@pytest.mark.parametrize("count", COUNTS)
def test_the_mesh(count: int) -> None:
    keys: dict[str, str] = {}

    class Keys:
        def set(self, name: str, value: str) -> None:
            keys[name] = value

    before = strangers.refused.counts.get("mesh", 0)
    links = Links(Keys(), "all", 0, 2, Site(None, "127.0.0.1", TOKEN))  # type: ignore[arg-type]
    links.open()
    (endpoint,) = keys.values()
    rng = random.Random(count)
    with harmless():
        for _ in range(count):
            with connect(endpoint, PATIENCE) as sock, suppress(ConnectionError):
                sock.sendall(rng.randbytes(rng.choice([0, 3, 39, 40, 41, 4000])))
                sock.shutdown(socket.SHUT_WR)
                assert links.answer(time.monotonic() + PATIENCE)
    assert links.made == {}
    links.close()
    assert strangers.refused.counts["mesh"] - before > count / 4


@pytest.mark.parametrize("count", COUNTS)
async def test_the_coordinator(count: int) -> None:
    machine = ScriptedMachine()
    rng = random.Random(count)
    before = strangers.refused.counts.get("coordinator", 0)
    secret = {"Authorization": f"Bearer {TOKEN}"}
    async with Coordinator(machine, token=TOKEN, record=lambda _: None, lease=PATIENCE) as coordinator:
        base, endpoint = f"http://127.0.0.1:{coordinator.port}", f"tcp:127.0.0.1:{coordinator.port}"
        async with aiohttp.ClientSession() as session:
            await session.get(f"{base}/job", headers=secret)  # its own first descriptors
            await one_thread(endpoint)

            async def ask(_: int) -> None:
                known = secret if rng.random() < 0.5 else {"Authorization": rng.choice(["", "Bearer x", "Bearer é"])}
                path = rng.choice(["/scale", "/drain", "/kill", "/join", "/status", "/job", "/agent", "/..%2f", "/x"])
                method, body = rng.choice(["GET", "POST", "PUT"]), rng.randbytes(rng.randint(0, 2000))
                with suppress(aiohttp.ClientError):
                    async with session.request(method, base + path, headers=known, data=body) as answer:
                        assert answer.status >= 400 or (known is secret and method == "GET"), (path, answer.status)

            async def speak(_: int) -> None:
                with suppress(aiohttp.ClientError):
                    async with session.ws_connect(f"{base}/agent?node=n", headers=secret) as talk:
                        await talk.send_bytes(rng.choice([rng.randbytes(300), b"\x91" * 20_000, b"", b"\x80"]))
                        await talk.receive(timeout=PATIENCE)

            async with harmless_to_a_loop():
                for at in range(count // 4):
                    await ask(at)
                    await ask(at)
                    await speak(at)
                    await asyncio.to_thread(call, endpoint, rng.randbytes(rng.randint(1, 3000)))
            async with session.get(f"{base}/job", headers=secret) as answer:
                assert msgspec.json.decode(await answer.read())["job"] == FACTS.job
        assert coordinator.crash == ""
    assert strangers.refused.counts["coordinator"] - before > count / 8


HALVES = (
    b"",
    b"GET /status HTTP/1.1\r\nHost: x\r\nA",
    b"POST /kill HTTP/1.1\r\nContent-Length: 9\r\n\r\n{",
    b"\x16\x03\x01",
)
STAYING = [300, pytest.param(3000, marks=pytest.mark.full)]


class Stayers:
    """Callers who say half of something and stay, until the other side hangs up."""

    def __init__(self, endpoint: str, count: int, halves: Sequence[bytes]) -> None:
        self.held: list[socket.socket] = []
        self.closed = 0
        for number in range(count):
            sock = connect(endpoint, PATIENCE)
            with suppress(ConnectionError):
                sock.sendall(halves[number % len(halves)])
            sock.setblocking(False)
            self.held.append(sock)

    def left(self) -> int:
        """Number of callers that have not been hung up on."""
        held, self.held = self.held, []
        for sock in held:
            try:
                while sock.recv(1 << 16):
                    pass
            except BlockingIOError:
                self.held.append(sock)
                continue
            except OSError:
                pass
            sock.close()
        return len(self.held)

    def wait(self) -> None:
        """Until the last of them is hung up on."""
        deadline = time.monotonic() + PATIENCE
        while self.left():
            assert time.monotonic() < deadline, f"{len(self.held)} are still held"
            time.sleep(0.05)


@pytest.mark.parametrize("count", STAYING)
async def test_callers_of_the_coordinator_who_stay_hold_nobody_up_and_are_hung_up_on(
    count: int, descriptors: None
) -> None:
    secret = {"Authorization": f"Bearer {TOKEN}"}
    async with Coordinator(ScriptedMachine(), token=TOKEN, record=lambda _: None, lease=PATIENCE) as coordinator:
        base, endpoint = f"http://127.0.0.1:{coordinator.port}", f"tcp:127.0.0.1:{coordinator.port}"
        async with aiohttp.ClientSession() as early:
            async with early.get(f"{base}/job", headers=secret) as answer:
                assert answer.status == 200
            await one_thread(endpoint)
            async with harmless_to_a_loop():
                stayers = await asyncio.to_thread(Stayers, endpoint, count, HALVES)
                for _ in range(5):  # as often as somebody says who he is, he is answered
                    async with aiohttp.ClientSession() as late, late.get(f"{base}/job", headers=secret) as answer:
                        assert answer.status == 200
                assert await asyncio.to_thread(stayers.left) <= strangers.MOST
                await asyncio.to_thread(stayers.wait)
            async with early.get(f"{base}/job", headers=secret) as answer:
                assert answer.status == 200, "who was admitted is not hung up on"
        assert coordinator.crash == ""


@pytest.fixture
def descriptors() -> Iterator[None]:
    """Enough of them for the callers of this process, too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 16_000) if hard > 0 else 16_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_who_comes_when_descriptors_have_run_out_is_answered_all_the_same() -> None:
    secret = {"Authorization": f"Bearer {TOKEN}"}
    async with Coordinator(ScriptedMachine(), token=TOKEN, record=lambda _: None, lease=PATIENCE) as coordinator:
        base, endpoint = f"http://127.0.0.1:{coordinator.port}", f"tcp:127.0.0.1:{coordinator.port}"
        await one_thread(endpoint)
        stayers = await asyncio.to_thread(Stayers, endpoint, 40, HALVES[1:2])
        asker = await asyncio.to_thread(connect, endpoint, PATIENCE)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (psutil.Process().num_fds(), hard))
        try:
            asker.sendall(f"GET /job HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode())
            assert b"200 OK" in await asyncio.to_thread(asker.recv, 1 << 16)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        asker.close()
        await asyncio.to_thread(stayers.wait)
        async with aiohttp.ClientSession() as session, session.get(f"{base}/job", headers=secret) as answer:
            assert answer.status == 200


@pytest.mark.parametrize(
    "said",
    [bytes(100_000), b"\xff" * 100_000, b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\n" * 9],
)
async def test_the_answer_to_what_is_no_request_is_short(said: bytes) -> None:
    async with Coordinator(ScriptedMachine(), token=TOKEN, record=lambda _: None, lease=PATIENCE) as coordinator:
        reader, writer = await asyncio.open_connection("127.0.0.1", coordinator.port)
        writer.write(said + b"\r\n\r\n")
        answer = b""
        with suppress(ConnectionError):
            async with asyncio.timeout(PATIENCE):
                answer = await reader.read()
        assert len(answer) < 400
        assert not answer or answer.startswith((b"HTTP/1.0 400", b"HTTP/1.1 400", b"HTTP/1.1 401"))
        writer.close()


def crowd_goes(stayers: Stayers) -> bool:
    """True if after a moment no more callers are left than may be waited for."""
    began = time.monotonic()
    while stayers.left() > strangers.MOST:
        if time.monotonic() - began > PATIENCE:
            return False
        time.sleep(0.02)
    return True


async def test_callers_of_an_agents_doors_who_stay_are_hung_up_on_too(tmp_path: Path) -> None:
    source: StateSource = Weights()
    copy_endpoint = CopyServer(CopyVersions(), token=TOKEN, folder=None, bind="127.0.0.1", advertise="127.0.0.1")
    halves = (b"", framed(b"half")[:6], _LENGTH.pack(1000) + b"more", b"GET / HTTP/1.1\r\n")
    async with StoreServer(config(job={"nodes": 2}, token=TOKEN, socket_dir=str(tmp_path))) as store:
        with HydrationServer(source, token=TOKEN, socket_dir=tmp_path, nodes=2) as hydration:
            try:
                doors = (store.address, hydration.endpoint, copy_endpoint.open())
                crowds = [await asyncio.to_thread(Stayers, endpoint, 200, halves) for endpoint in doors]
                for stayers in crowds:
                    assert await asyncio.to_thread(crowd_goes, stayers)
                for stayers in crowds:
                    await asyncio.to_thread(stayers.wait)
            finally:
                copy_endpoint.close()


def test_a_flood_of_them_is_not_one_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    refusals = strangers.Refusals()
    for _ in range(10_000):
        refusals.add("door", "no token")
    assert refusals.counts == {"door": 10_000}
    assert len(caplog.records) == 14
