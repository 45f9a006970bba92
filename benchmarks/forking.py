"""Processes for `rendezvous.py` and `data.py`, forked from one with torch imported; among them agents' stores."""

import asyncio
import json
import os
import resource
import select
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from regrow.agent.store.server import StoreServer
from regrow.core.config import AgentConfig, Script
from regrow.core.ids import Generation, JobId, NodeId, Seconds
from regrow.core.job import JobSpec
from regrow.core.messages.vocabulary import Warmth

PER_NODE = 8
DEADLINE_S = 120.0
TOKEN = "a token of the usual length, 43 characters."


class Failed(Exception):
    """A process failed or did not end; its traceback is on standard error."""


class Child(NamedTuple):
    """A forked process. It sends lines of JSON, and waits for lines of the parent."""

    pid: int
    said: int
    told: int

    def hear(self, within: Seconds = DEADLINE_S) -> Any:
        """Next message of the process."""
        if not select.select([self.said], [], [], within)[0] or not (line := _line(self.said)):
            raise Failed("a process did not answer")
        return json.loads(line)

    def tell(self, what: Any) -> None:
        """Send a line, so that it continues."""
        os.write(self.told, json.dumps(what).encode() + b"\n")


def _line(descriptor: int) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        more = os.read(descriptor, 1 << 16)
        if not more:
            return b""
        line += more
    return line


class Parent(NamedTuple):
    """The child's end of the connection."""

    out: int
    come: int

    def say(self, what: Any) -> None:
        """Send a line."""
        os.write(self.out, json.dumps(what).encode() + b"\n")

    def hear(self) -> Any:
        """Wait for a line; an empty one means that the parent has ended."""
        return json.loads(_line(self.come) or b"null")


@contextmanager
def forked(*bodies: Callable[[Parent], None]) -> Iterator[list[Child]]:
    """A process for each body; all are killed at the end of the block."""
    children: list[Child] = []
    try:
        for body in bodies:
            (said, out), (come, told) = os.pipe(), os.pipe()
            pid = os.fork()
            if not pid:
                _run(body, Parent(out, come))
            os.close(out)
            os.close(come)
            children.append(Child(pid, said, told))
        yield children
    finally:
        for child in children:
            os.kill(child.pid, signal.SIGKILL)  # it has ended or its time is up; the pid is valid until the wait
            os.waitpid(child.pid, 0)
            os.close(child.said)
            os.close(child.told)


def _run(body: Callable[[Parent], None], parent: Parent) -> None:
    code = 1
    try:
        torch.set_num_threads(1)
        body(parent)
        code = 0
    except BaseException:  # noqa: BLE001  whatever it is, it ends this process and is shown
        traceback.print_exc()
    os._exit(code)  # skips the interpreter's shutdown, which would destroy gloo's threads


def agent(node: int, nodes: int, world: int, folder: str) -> Callable[[Parent], None]:
    """An agent's store in a process of its own; reports its cost at the end."""

    async def serve(parent: Parent) -> None:
        loop = asyncio.get_running_loop()
        place = Path(folder) / str(node)
        place.mkdir()
        spec = JobSpec(JobId("j"), PER_NODE, nodes, 0, Warmth.BUILT, 1, 1.0, None, False)
        script = Script("s", [])
        config = AgentConfig(
            spec, NodeId(str(node)), node, "", TOKEN, script, folder, folder, socket_dir=str(place), local=True
        )
        async with StoreServer(config) as server:
            parent.say(server.address)
            server.generation_formed(Generation(1), await loop.run_in_executor(None, parent.hear), world)
            parent.say("ready")
            before = cpu()
            await loop.run_in_executor(None, parent.hear)
            parent.say(cpu() - before)

    return lambda parent: asyncio.run(serve(parent))


@contextmanager
def agents(nodes: int, world: int) -> Iterator[tuple[list[str], list[Child]]]:
    """Run `nodes` connected agents of a job of `world` ranks; yields their addresses and their processes."""
    with (
        tempfile.TemporaryDirectory(prefix="regrow-rendezvous-") as folder,
        forked(*(agent(node, nodes, world, folder) for node in range(nodes))) as children,
    ):
        stores = [child.hear() for child in children]
        for child in children:
            child.tell(stores)
        for child in children:
            child.hear()
        yield stores, children


def cpu() -> Seconds:
    """CPU seconds of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
