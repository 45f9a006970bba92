"""Reports of a zygote and the agent's side of it about a fork, whatever happens in its middle."""

import asyncio
import errno
import os
import select
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import cast

import msgspec
import pytest

from regrow.agent.workers.zygote_client import TRIES, ZygoteClient
from regrow.agent.workers.zygote_messages import (
    PACKET_BYTES,
    Spawned,
    SpawnFailed,
    SpawnRequest,
    ZygoteFact,
    ZygoteReady,
)
from regrow.core.config import Script, WorkerEnv
from regrow.core.ids import WorkerId
from regrow.core.messages.vocabulary import ErrorReport

WORKER = WorkerId("w0")

FORKS = """
import os, signal, socket, sys, time
from types import SimpleNamespace
from regrow.agent.workers import zygote

control = zygote._Control(int(sys.argv[1]))
request = SimpleNamespace(env=SimpleNamespace(worker="w0"))
fork, forks, first = os.fork, 0, os.getpid()

def fork_once_alone():
    global forks
    forks += 1
    pid = fork()
    if forks == 1 and pid:
        os.kill(first, signal.SIGKILL)
    while forks == 1 and not pid and os.getppid() == first:
        time.sleep(0.001)
    return pid

os.fork = fork_once_alone
zygote._spawn(control, set(), request, [], zygote.WorkerSeed(request, [], {}, 0, 0))
os._exit(0)  # the worker, which has nothing to do here
"""


def heard(packets: Sequence[bytes]) -> list[ZygoteFact]:
    return [msgspec.msgpack.decode(packet, type=ZygoteFact) for packet in packets]


def test_a_worker_has_been_forked_though_its_zygote_is_killed_at_that_moment() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(60.0)
    with ours:
        with theirs:
            words = [sys.executable, "-c", FORKS, str(theirs.fileno())]
            assert subprocess.run(words, pass_fds=[theirs.fileno()], timeout=60.0, check=False).returncode == -9
        packets = list(iter(lambda: ours.recv(PACKET_BYTES), b""))
    told = heard(packets)
    assert [type(fact) for fact in told] == [Spawned]
    assert isinstance(told[0], Spawned) and told[0].worker == WORKER


class Zygote:
    """Stands in the place of the process: says what it is told to say."""

    pid, returncode = 1 << 22, 0

    def __init__(self, descriptor: int) -> None:
        self.socket = socket.socket(fileno=os.dup(descriptor))

    def says(self, *facts: ZygoteFact) -> None:
        for fact in facts:
            self.socket.send(msgspec.msgpack.encode(fact))

    @property
    def has_been_asked(self) -> bool:
        """True if there is a request that `asked` has not taken."""
        return bool(select.select([self.socket], [], [], 0.0)[0])

    async def asked(self) -> None:
        """Take the next request for a fork."""
        async with asyncio.timeout(30.0):
            while True:
                while not self.has_been_asked:
                    await asyncio.sleep(0.001)
                if b"SpawnRequest" in self.socket.recv(PACKET_BYTES):
                    return

    def poll(self) -> int:
        return 0

    def kill(self) -> None: ...

    def terminate(self) -> None: ...

    def wait(self, timeout: float) -> int:
        raise subprocess.TimeoutExpired("zygote", timeout)


class Outcomes:
    """Of requests, in the order in which they were told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, WorkerId]] = []

    def worker_spawned(self, worker: WorkerId, pid: int) -> None:
        self.told.append(("spawned", worker))

    def spawn_failed(self, worker: WorkerId, error: ErrorReport) -> None:
        self.told.append(("failed", worker))


class Zygotes(list[Zygote]):
    """All that were started."""

    refused = 0
    """Times more that the system has nothing left for one."""

    def start(self, *_: object, pass_fds: Sequence[int], **__: object) -> Zygote:
        if self.refused:
            self.refused -= 1
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        self.append(Zygote(pass_fds[0]))
        return self[-1]

    async def are(self, count: int) -> None:
        """Wait until `count` were started."""
        async with asyncio.timeout(30.0):
            while len(self) < count:
                await asyncio.sleep(0.001)


@pytest.fixture
def zygotes(monkeypatch: pytest.MonkeyPatch) -> Zygotes:
    started = Zygotes()
    monkeypatch.setattr(subprocess, "Popen", started.start)
    monkeypatch.setattr("regrow.agent.workers.zygote_client.AGAIN_S", 0.01)
    return started


class Named(msgspec.Struct):
    """As much of a worker's environment as is looked at."""

    worker: WorkerId


def request() -> SpawnRequest:
    return SpawnRequest(cast(WorkerEnv, Named(WORKER)), Script("script.py", []), {})


def started_client(outcomes: Outcomes) -> ZygoteClient:
    client = ZygoteClient(outcomes, preload=[], path_entry=None, one_thread=True, guarded=list)
    client.start()
    return client


async def heard_one(outcomes: Outcomes) -> None:
    async with asyncio.timeout(30.0):
        while not outcomes.told:
            await asyncio.sleep(0.001)
    await asyncio.sleep(0.01)  # for one too many


async def test_each_request_has_one_outcome_whatever_is_said_after_it(zygotes: Zygotes) -> None:
    outcomes = Outcomes()
    client = started_client(outcomes)
    zygotes[0].says(ZygoteReady(1, 0.1))
    client.spawn(request(), [])
    zygotes[0].says(Spawned(WORKER, 7), SpawnFailed(WORKER, "the pipe to the zygote broke"))
    await heard_one(outcomes)
    assert outcomes.told == [("spawned", WORKER)]
    await client.close()


async def test_what_a_killed_zygote_said_last_is_heard_though_it_left_requests_unread(zygotes: Zygotes) -> None:
    outcomes = Outcomes()
    client = started_client(outcomes)
    client.spawn(request(), [])
    zygotes[0].says(ZygoteReady(1, 0.1), Spawned(WORKER, 7))
    zygotes[0].socket.close()
    await zygotes.are(2)
    assert outcomes.told == [("spawned", WORKER)]
    zygotes[1].says(ZygoteReady(1, 0.1))
    await asyncio.sleep(0.05)
    zygotes[1].socket.recv(PACKET_BYTES)  # how it is set up
    assert not zygotes[1].has_been_asked, "the worker would be there twice"
    await client.close()


async def test_a_zygote_that_takes_long_to_die_holds_up_nobody(zygotes: Zygotes) -> None:
    outcomes = Outcomes()
    client = started_client(outcomes)
    zygotes[0].says(ZygoteReady(1, 0.1))
    client.spawn(request(), [])
    zygotes[0].socket.close()
    await zygotes.are(2)
    zygotes[1].says(ZygoteReady(1, 0.1), Spawned(WORKER, 8))
    await heard_one(outcomes)
    assert outcomes.told == [("spawned", WORKER)]
    await client.close()


async def test_a_zygote_for_which_nothing_is_left_is_started_when_there_is(zygotes: Zygotes) -> None:
    outcomes, zygotes.refused = Outcomes(), 20
    client = started_client(outcomes)
    client.spawn(request(), [])
    await zygotes.are(1)
    zygotes[0].says(ZygoteReady(1, 0.1), Spawned(WORKER, 7))
    await heard_one(outcomes)
    assert outcomes.told == [("spawned", WORKER)]
    await client.close()


@pytest.mark.parametrize(("refusals", "outcome"), [(1, "spawned"), (TRIES - 1, "spawned"), (TRIES, "failed")])
async def test_a_fork_that_is_refused_is_tried_again_some_times(zygotes: Zygotes, refusals: int, outcome: str) -> None:
    outcomes = Outcomes()
    client = started_client(outcomes)
    zygotes[0].says(ZygoteReady(1, 0.1))
    client.spawn(request(), [])
    for _ in range(refusals):
        await zygotes[0].asked()
        zygotes[0].says(SpawnFailed(WORKER, "no process is to be had"))
    if outcome == "spawned":
        await zygotes[0].asked()
        zygotes[0].says(Spawned(WORKER, 7))
    await heard_one(outcomes)
    assert outcomes.told == [(outcome, WORKER)]
    await client.close()


async def test_a_zygote_that_refused_a_fork_and_died_is_followed_by_one_that_is_asked_once(zygotes: Zygotes) -> None:
    outcomes = Outcomes()
    client = started_client(outcomes)
    zygotes[0].says(ZygoteReady(1, 0.1))
    client.spawn(request(), [])
    await zygotes[0].asked()
    zygotes[0].says(SpawnFailed(WORKER, "no process is to be had"))
    zygotes[0].socket.close()
    await zygotes.are(2)
    zygotes[1].says(ZygoteReady(1, 0.1))
    await zygotes[1].asked()
    await asyncio.sleep(0.05)  # five times as long as a refused fork waits
    assert not zygotes[1].has_been_asked
    zygotes[1].says(Spawned(WORKER, 8))
    await heard_one(outcomes)
    assert outcomes.told == [("spawned", WORKER)]
    await client.close()
