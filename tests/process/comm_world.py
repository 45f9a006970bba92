"""Worlds of real processes for transports: forked from a server that has torch imported and no threads."""

import asyncio
import multiprocessing
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from inspect import signature
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
import torch.distributed as dist
from tests.unit.agent.test_agent_environment import config
from torch._C._distributed_c10d import FileStore

from regrow.agent.store.server import StoreServer
from regrow.comm.links import Links, Site
from regrow.comm.socket_mesh import SocketMesh
from regrow.comm.torch_private.internals import PrefixStore, Store
from regrow.comm.transport import MeshTransport

DEADLINE = 120.0
_SERVER = multiprocessing.get_context("forkserver")
# What scripts import, once instead of in each process: seconds each.
_SERVER.set_forkserver_preload(
    [
        "regrow.comm.groups",
        "torch._dynamo",
        "torch.distributed.pipelining",
        "torch.distributed.tensor.parallel",
        "tests.process.comm_world",
        "tests.process.comm_cases",
        "tests.process.comm_misuse",
        "tests.process.comm_parallel",
        "tests.process.comm_scripts",
        "tests.process.tree_sum_scripts",
        "tests.process.comm_ready",
    ]
)
_ROOT = str(Path(__file__).parents[2])


class Call(Protocol):
    """Runs one method of `ProcessGroup` by name and waits for it."""

    def __call__(self, name: str, *args: Any) -> None: ...


@dataclass(frozen=True)
class Seat:
    """One process's place in a world."""

    rank: int
    size: int
    folder: str
    tcp: bool

    @property
    def site(self) -> Site:
        return Site(None if self.tcp else self.folder, "127.0.0.1", "secret")

    def store(self, name: str) -> Store:
        keys = FileStore(f"{self.folder}/keys", -1)
        return PrefixStore(name, keys)

    def mesh(self, name: str) -> SocketMesh:
        return SocketMesh(Links(self.store(name), f"mesh/{name}", self.rank, self.size, self.site))

    def transport(self, name: str) -> MeshTransport:
        transport = MeshTransport(self.mesh(name))
        transport.form(DEADLINE)
        return transport

    def ours(self, transport: MeshTransport) -> Call:
        return lambda name, *args: _done(transport.call(name, args, {}))

    def gloo(self) -> Call:
        """torch's own transport, which takes contiguous tensors only."""
        group = dist.ProcessGroupGloo(self.store("gloo"), self.rank, self.size, timedelta(seconds=DEADLINE))

        def call(name: str, *args: Any) -> None:
            copies: list[tuple[torch.Tensor, torch.Tensor]] = []
            _done(getattr(group, name)(*_contiguous(list(args), copies)))
            for tensor, copy in copies:
                tensor.copy_(copy)

        return call


def _done(work: Any) -> None:
    work.wait()


def _contiguous(value: Any, copies: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    if isinstance(value, list):
        return [_contiguous(item, copies) for item in value]
    if isinstance(value, torch.Tensor) and not value.is_contiguous():
        copies.append((value, value.contiguous()))
        return copies[-1][1]
    return value


@dataclass
class World:
    """Processes that have been started, one a rank."""

    processes: list[Any]
    pipes: list[Connection]

    def tell(self, order: Any) -> None:
        """Send all of them the same."""
        for pipe in self.pipes:
            pipe.send(order)

    def but(self, left_out: int) -> "World":
        """All but one of them."""
        kept = [at for at in range(len(self.pipes)) if at != left_out]
        return World([self.processes[at] for at in kept], [self.pipes[at] for at in kept])

    def halt_when_asked(self, times: int) -> None:
        """Each time one of them says "halt", tell all of them."""
        for _ in range(times):
            ready = wait(self.pipes, timeout=DEADLINE)
            assert ready, f"nobody asked for a halt within {DEADLINE} s"
            asking = next(pipe for pipe in self.pipes if pipe in ready)
            error, said = asking.recv()
            assert said == "halt", error
            self.tell("halt")

    def results(self) -> list[Any]:
        """Next message of each process, or its body's result. Fails with one's traceback, or if one takes too long."""
        until, found = time.monotonic() + DEADLINE, dict[int, Any]()
        while waiting := [pipe for at, pipe in enumerate(self.pipes) if at not in found]:
            ready = wait(waiting, timeout=max(0.0, until - time.monotonic()))
            assert ready, f"{len(waiting)} of {len(self.pipes)} said nothing within {DEADLINE} s"
            for at in [at for at, pipe in enumerate(self.pipes) if pipe in ready]:
                try:
                    error, found[at] = self.pipes[at].recv()
                except EOFError:
                    error = "it ended without a word"
                assert not error, f"process {at}: {error}"
        return [found[at] for at in range(len(self.pipes))]


@contextmanager
def world(seats: Sequence[Seat], body: Callable[..., Any], *args: Any) -> Iterator[World]:
    """`body(seat, *args)` in a process a seat, with its end of the `pipe` if it wants it; they are gone afterwards."""
    _start_server()
    processes, pipes = [], []
    try:
        for seat in seats:
            ours, theirs = _SERVER.Pipe()
            process = _SERVER.Process(target=_enter, args=(theirs, body, seat, args))
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        yield World(processes, pipes)
    finally:
        for process in processes:
            process.kill()
            process.join()
            process.close()
        for pipe in pipes:
            pipe.close()


def _start_server() -> None:
    """Start the server, unless it runs: it looks for what it imports where `PYTHONPATH` says, and not where we do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", _ROOT, prepend=os.pathsep)
        forkserver.ensure_running()


def play(size: int, folder: Path, body: Callable[..., Any], *args: Any, tcp: bool = False) -> list[Any]:
    """Results of the body, rank by rank."""
    with world([Seat(rank, size, str(folder), tcp) for rank in range(size)], body, *args) as playing:
        return playing.results()


def _enter(pipe: Connection, body: Callable[..., Any], seat: Seat, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    wants = {"pipe": pipe} if "pipe" in signature(body).parameters else {}
    try:
        answer = ("", body(seat, *args, **wants))
    except Exception:  # noqa: BLE001 - whatever it is, the test shows it
        answer = (traceback.format_exc(), None)
    pipe.send(answer)
    pipe.close()
    os._exit(0)  # torch's gloo may hang in its destructors


def as_bytes(tensors: list[torch.Tensor]) -> list[bytes]:
    return [tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors]


@contextmanager
def store(folder: Path) -> Iterator[str]:
    """The address of an agent's store, served from a thread."""
    addresses: list[str] = []
    ready, loop = threading.Event(), asyncio.new_event_loop()
    over = asyncio.Event()

    async def serve() -> None:
        async with StoreServer(config(socket_dir=str(folder), token="secret")) as server:
            addresses.append(server.address)
            ready.set()
            await over.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(DEADLINE)
        yield addresses[0]
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()
        loop.close()
