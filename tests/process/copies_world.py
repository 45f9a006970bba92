"""Vaults and workers in processes of their own, and a line between them that a test can cut, hold or spoil."""

import contextlib
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import torch

from regrow.agent.state_copies.store import CopyStore
from regrow.core.config import AgentConfig, Script
from regrow.core.errors import StateError
from regrow.core.ids import Generation, JobId, NodeId, Rank, StepNo, WorkerId
from regrow.core.job import JobSpec
from regrow.core.messages.copies import CopyStreamEnded, PlaceCopies, ReportCopies, SnapshotStored, SnapshotTaken
from regrow.core.messages.vocabulary import Warmth
from regrow.hydration.copies.snapshot import SnapshotKeeper
from regrow.hydration.inventory import Inventory, TensorEntry

TOKEN = "secret"
WITHIN_S = 30.0


class State:
    """A source and a sink over tensors; `touch` is called with each name that is read."""

    def __init__(self, tensors: dict[str, torch.Tensor], touch: Callable[[str], None] | None = None) -> None:
        self.tensors = tensors
        self.touch = touch
        self.finished = False

    def inventory(self, step: StepNo) -> Inventory:
        entries = [TensorEntry.of(name, tensor) for name, tensor in sorted(self.tensors.items())]
        return Inventory(step, entries, b"python")

    def tensor(self, name: str) -> torch.Tensor:
        if self.touch is not None:
            self.touch(name)
        return self.tensors[name]

    def prepare(self, inventory: Inventory) -> dict[str, torch.Tensor]:
        if [entry.name for entry in inventory.entries] != sorted(self.tensors):
            raise StateError("it has other tensors")
        return self.tensors

    def finish(self) -> None:
        self.finished = True


def tensors(rank: int, step: int, size: int = 1 << 19) -> dict[str, torch.Tensor]:
    """Tensors of rank `rank` at a step: large, small and crooked ones, about 9 `size` bytes."""
    random = torch.Generator().manual_seed(1000 * rank + step)
    made = {f"w{at}": torch.randn(size, generator=random) for at in range(2)}
    made |= {f"s{at:02}": torch.randn(at + 1, generator=random) for at in range(30)}
    made["crooked"] = torch.randn(64, size // 1024, generator=random).t()
    return made


def blank(rank: int, size: int = 1 << 19) -> State:
    """Somebody who has lost that state."""
    return State({name: torch.zeros_like(tensor) for name, tensor in tensors(rank, 0, size).items()})


class Process:
    """A forked process that does what it is asked, one thing at a time."""

    def __init__(self, make: Callable[[Connection], Any]) -> None:
        self._pipe, theirs = Pipe()
        self.before: list[str] = []
        """Its descriptors before it did anything."""
        self.pid = os.fork()
        if self.pid == 0:
            # Not pytest's exit: a fork must never run the rest of the test session.
            try:
                torch.set_num_threads(1)
                self._pipe.close()
                _serve(make(theirs), theirs)
            except BaseException:  # noqa: BLE001 - shown, then the process ends
                traceback.print_exc()
            finally:
                os._exit(0)
        theirs.close()

    def ask(self, what: str, *args: Any) -> Any:
        self.send(what, *args)
        return self.answer()

    def send(self, what: str, *args: Any) -> None:
        self._pipe.send((what, args))

    def answer(self, within: float = WITHIN_S) -> Any:
        assert self._pipe.poll(within), "no answer in time"
        return self._pipe.recv()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        self._pipe.close()

    def descriptors(self) -> list[str]:
        folder, found = f"/proc/{self.pid}/fd", []
        for name in os.listdir(folder):
            with contextlib.suppress(FileNotFoundError):  # closed just now
                found.append(os.readlink(f"{folder}/{name}"))
        return sorted(found)

    def segments(self) -> set[str]:
        """Inodes of all shared memory with copies that the process has mapped."""
        lines = Path(f"/proc/{self.pid}/maps").read_text().splitlines()
        return {line.split()[4] for line in lines if "regrow-copy" in line}

    def ends_threads(self, left: int) -> bool:
        """Wait until `left` threads are left; for the kernel one that was joined may still be there for a moment."""
        deadline = time.monotonic() + WITHIN_S
        while len(os.listdir(f"/proc/{self.pid}/task")) != left and time.monotonic() < deadline:
            time.sleep(0.01)
        return len(os.listdir(f"/proc/{self.pid}/task")) == left


def _serve(served: Any, pipe: Connection) -> None:
    while True:
        try:
            what, args = pipe.recv()
        except EOFError:
            return
        pipe.send(getattr(served, what)(*args))


class Node:
    """A vault, as its process has it."""

    def __init__(self, name: str, folder: Path, *, local: bool, patience: float) -> None:
        spec = JobSpec(JobId("j"), 1, 2, 0, Warmth.BUILT, 1, 1.0, 0, False)
        config = AgentConfig(spec, NodeId(name), 0, "", TOKEN, Script("", []), "", "", str(folder), local=local)
        self._news = threading.Condition()
        self._stored: list[SnapshotStored] = []
        self._streamed: list[CopyStreamEnded] = []
        self._name = name
        self._copy_store = CopyStore(config, stored=self._hear, streamed=self._hear, patience=patience)

    def _hear(self, fact: SnapshotStored | CopyStreamEnded) -> None:
        with self._news:
            (self._stored if isinstance(fact, SnapshotStored) else self._streamed).append(fact)  # type: ignore[arg-type]
            self._news.notify_all()

    def open(self) -> str:
        return self._copy_store.open()

    def place(self, buddy: str, endpoint: str) -> None:
        self._copy_store.place(PlaceCopies(NodeId(self._name), NodeId(buddy), endpoint))

    def taken(self, fact: SnapshotTaken, pid: int) -> None:
        self._copy_store.snapshot_taken(fact, pid)

    def stored(self, step: int) -> SnapshotStored | None:
        """The answer to the worker about a step, waited for."""
        with self._news:
            self._news.wait_for(lambda: any(each.step == step for each in self._stored), WITHIN_S)
            return next((each for each in self._stored if each.step == step), None)

    def streamed(self) -> list[CopyStreamEnded]:
        with self._news:
            return list(self._streamed)

    def held(self) -> list[tuple[int, int]]:
        copies = self._copy_store.report(ReportCopies(NodeId(self._name), Generation(1))).copies
        return [(copy.rank, copy.step) for copy in copies]

    def wait_held(self, rank: int, step: int) -> bool:
        """Wait until a copy is there; False after the time. It is polled, as nothing reports it."""
        waiting = threading.Event()
        for _ in range(int(WITHIN_S / 0.01)):
            if (rank, step) in self.held():
                return True
            waiting.wait(0.01)
        return False

    def formed(self, step: int) -> None:
        self._copy_store.formed(StepNo(step))

    def ended(self, worker: str) -> None:
        self._copy_store.worker_ended(WorkerId(worker))

    def close(self) -> None:
        self._copy_store.close()

    def limit_memory(self, nbytes: int) -> None:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, resource.RLIM_INFINITY))


class Worker:
    """Worker that takes copies, as its process does it."""

    def __init__(self, rank: int, pipe: Connection, size: int) -> None:
        self._rank = rank
        self._pipe = pipe
        self._size = size
        self._told: list[SnapshotTaken] = []
        self._keeper = SnapshotKeeper(WorkerId(f"w{rank}"), send=self._told.append)

    def take(self, step: int) -> SnapshotTaken:
        self._take(State(tensors(self._rank, step, self._size)), step)
        return self._told[-1]

    def take_half(self, step: int) -> None:
        """Copy until the third tensor is asked for, say so, and go no further."""
        asked: list[str] = []

        def touch(name: str) -> None:
            asked.append(name)
            if len(asked) == 3:
                self._pipe.send("half")
                signal.pause()

        self._take(State(tensors(self._rank, step, self._size), touch), step)

    def _take(self, source: State, step: int) -> None:
        self._keeper.take(source, StepNo(step), Rank(self._rank), f"shard {self._rank}")


class Line:
    """A connection in between: passes `limit` bytes up, then holds until it is cut; flips a bit at byte `flip`.

    Only the first connection is held and spoiled.
    """

    def __init__(self, endpoint: str, path: Path, *, limit: int | None = None, flip: int | None = None) -> None:
        self._target = endpoint
        self._limit, self._flip = limit, flip
        self.held = threading.Event()
        self.passed: list[int] = []
        self._go = threading.Event()
        self._socks: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self.endpoint = f"unix:{path}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                front, _ = self._listener.accept()
            except OSError:
                return
            back = socket.socket(socket.AF_UNIX)
            self._socks += [front, back]
            number = len(self.passed)
            self.passed.append(0)
            try:
                back.connect(self._target.removeprefix("unix:"))
            except OSError:
                front.close()
                continue
            threading.Thread(target=self._pump, args=(front, back, number), daemon=True).start()
            threading.Thread(target=self._pump, args=(back, front, None), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, number: int | None) -> None:
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(1 << 16)):
                if number is not None:
                    before, self.passed[number] = self.passed[number], self.passed[number] + len(data)
                    if number == 0 and self._flip is not None and before <= self._flip < before + len(data):
                        data[self._flip - before] ^= 1
                    if number == 0 and self._limit is not None and self.passed[0] > self._limit:
                        self.held.set()
                        self._go.wait(WITHIN_S)
                sink.sendall(data)
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        for sock in list(self._socks):  # and none that comes meanwhile, in place of one of these
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self._go.set()

    def close(self) -> None:
        self.cut()
        self._listener.close()
        for sock in self._socks:
            sock.close()
