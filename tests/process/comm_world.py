"""Worlds of real processes for transports: forked from a server that has torch imported and no threads."""

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from regrow.comm.mesh import Mesh, Site
from regrow.comm.transport import MeshTransport

DEADLINE = 60.0
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["regrow.comm.groups"])


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

    def store(self, name: str) -> dist.Store:
        keys = dist.FileStore(f"{self.folder}/keys", -1)
        return dist.PrefixStore(name, keys)

    def mesh(self, name: str) -> Mesh:
        return Mesh(self.store(name), f"mesh/{name}", self.rank, self.size, self.site)

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

    def pid(self, rank: int) -> int:
        pid = self.processes[rank].pid
        assert isinstance(pid, int)
        return pid

    def results(self, ranks: list[int] | None = None) -> list[Any]:
        """What the body returned on each of these ranks. Fails with a rank's traceback, or where one takes too long."""
        until, found = time.monotonic() + DEADLINE, dict[int, Any]()
        waiting = {self.pipes[rank]: rank for rank in (range(len(self.pipes)) if ranks is None else ranks)}
        wanted = list(waiting.values())
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, until - time.monotonic()))
            assert ready, f"ranks {sorted(waiting.values())} did not end within {DEADLINE} s"
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                try:
                    error, value = pipe.recv()
                except EOFError:
                    error, value = "it ended without a word", None
                assert not error, f"rank {rank}: {error}"
                found[rank] = value
        return [found[rank] for rank in wanted]


@contextmanager
def world(size: int, folder: Path, body: Callable[..., Any], *args: Any, tcp: bool = False) -> Any:
    """`body(seat, *args)` in a process a rank; they are gone afterwards."""
    processes, pipes = [], []
    try:
        for rank in range(size):
            ours, theirs = _SERVER.Pipe(duplex=False)
            process = _SERVER.Process(target=_enter, args=(theirs, body, Seat(rank, size, str(folder), tcp), args))
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


def play(size: int, folder: Path, body: Callable[..., Any], *args: Any, tcp: bool = False) -> list[Any]:
    """What the body returned, rank by rank."""
    with world(size, folder, body, *args, tcp=tcp) as playing:
        results: list[Any] = playing.results()
        return results


def _enter(pipe: Connection, body: Callable[..., Any], seat: Seat, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        answer = ("", body(seat, *args))
    except Exception:
        answer = (traceback.format_exc(), None)
    pipe.send(answer)
    pipe.close()
    os._exit(0)  # torch's gloo may hang in its destructors


def as_bytes(tensors: list[torch.Tensor]) -> list[bytes]:
    return [tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors]
