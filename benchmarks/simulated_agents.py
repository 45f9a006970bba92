"""Agents for `control_plane.py`: each communicates with the coordinator as a real one does, and simulates its workers.

One process has many of them. They are as cheap as possible, since they share the machine with the measured coordinator:
frames are read and written by hand, and times are taken before decoding. Commands are lines on standard input.
"""

import argparse
import asyncio
import json
import struct
import sys
import time
from base64 import b64encode
from collections import Counter
from typing import Any

import msgspec

from regrow.core.ids import NO_STATE, Generation, NodeId, StepNo, WorkerId
from regrow.core.messages import facts
from regrow.core.messages.observations import ProveAlive, WorkerAlive
from regrow.core.messages.orders import FenceWorker, HaltGeneration, ReleaseWorker, SpawnWorker
from regrow.core.messages.tables import JoinGeneration
from regrow.core.messages.unions import AgentFact, AgentOrder
from regrow.core.messages.vocabulary import Role

BINARY, CLOSE, PING, PONG = 0x2, 0x8, 0x9, 0xA
_AT_ONCE = 100
"""Number of agents that connect at the same time."""


class Agents:
    """All agents of a process, with the events that they have seen."""

    def __init__(self, nproc: int, token: str) -> None:
        self.nproc, self.token = nproc, token
        self.decoder = msgspec.msgpack.Decoder(AgentOrder | list[AgentOrder])
        self.encoder = msgspec.msgpack.Encoder()
        self.step = StepNo(0)
        self.agents: list[Agent] = []
        self.counts: Counter[str] = Counter()
        self.last: dict[str, float] = {}

    def seen(self, what: str, at: float) -> None:
        """Count an event."""
        self.counts[what] += 1
        self.last[what] = at

    def report(self) -> dict[str, Any]:
        """The events since the last call."""
        found = {"counts": dict(self.counts), "last": dict(self.last)}
        self.counts, self.last = Counter(), {}
        return found

    def commit(self) -> None:
        """Commit the next step of every worker with a rank."""
        for agent in self.agents:
            for worker, generation in agent.members.items():
                agent.send(facts.WorkerCommitted(worker, generation, self.step, time.monotonic(), 0.1))
        self.step = StepNo(self.step + 1)

    def kill(self) -> float:
        """Report the death of a worker of the first agent; returns the time of the report."""
        agent = self.agents[0]
        worker = next(iter(agent.members))
        del agent.members[worker]
        at = time.monotonic()
        agent.send(facts.WorkerExited(worker, -9, at))
        return at


class Agent(asyncio.Protocol):
    """One agent: connects, registers, and carries out orders."""

    def __init__(self, agents: Agents, number: int) -> None:
        self.agents, self.node = agents, NodeId(f"node{number}")
        self.members: dict[WorkerId, Generation] = {}
        self.spawned = 0
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.received = bytearray()
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Request a WebSocket."""
        if not isinstance(transport, asyncio.Transport):
            raise SystemExit("the connection is no stream")
        self.transport = transport
        key = b64encode(self.node.encode().ljust(16)[:16]).decode()
        lines = [
            f"GET /agent?node={self.node} HTTP/1.1",
            "Host: coordinator",
            "Upgrade: websocket",
            "Connection: Upgrade",
            f"Authorization: Bearer {self.agents.token}",
            f"Sec-WebSocket-Key: {key}",
            "Sec-WebSocket-Version: 13",
        ]
        transport.write("\r\n".join([*lines, "", ""]).encode())

    def connection_lost(self, error: Exception | None) -> None:
        """The coordinator has closed the connection."""
        self.agents.seen("lost", time.monotonic())
        if not self.ready.done():
            self.ready.set_exception(ConnectionError(f"{self.node} was refused"))

    def data_received(self, data: bytes) -> None:
        """Handle the response to the request, then frames."""
        at = time.monotonic()
        self.received += data
        if not self.ready.done():
            head, found, rest = bytes(self.received).partition(b"\r\n\r\n")
            if not found:
                return
            if b" 101 " not in head:
                self.ready.set_exception(ConnectionError(head.decode(errors="replace")))
                return
            self.received = bytearray(rest)
            self.ready.set_result(None)
            host = f"host-{self.node}"
            self.send(facts.NodeJoined(self.node, host, self.agents.nproc, f"tcp:{host}:40000"))
        while (frame := self._frame()) is not None:
            self._take(*frame, at)

    def _frame(self) -> tuple[int, bytes] | None:
        """The next complete frame: its kind and its content."""
        received = self.received
        if len(received) < 2:
            return None
        length, start = received[1] & 0x7F, 2
        if length >= 126:
            form, start = ("!H", 4) if length == 126 else ("!Q", 10)
            if len(received) < start:
                return None
            (length,) = struct.unpack_from(form, received, 2)
        if len(received) < start + length:
            return None
        kind, body = received[0] & 0x0F, bytes(received[start : start + length])
        del received[: start + length]
        return kind, body

    def _write(self, kind: int, body: bytes) -> None:
        """Write a frame with the mask 0, which leaves the content unchanged."""
        if len(body) < 126:
            head = bytes((0x80 | kind, 0x80 | len(body)))
        else:
            head = bytes((0x80 | kind, 0xFE)) + struct.pack("!H", len(body))
        if self.transport is not None:
            self.transport.write(head + bytes(4) + body)

    def send(self, fact: AgentFact) -> None:
        """Send a fact."""
        self._write(BINARY, self.agents.encoder.encode(fact))

    def _take(self, kind: int, body: bytes, at: float) -> None:
        if kind == PING:
            self._write(PONG, body)
        elif kind == BINARY:
            orders = self.agents.decoder.decode(body)
            for order in orders if isinstance(orders, list) else [orders]:
                self._obey(order, at)

    def _obey(self, order: AgentOrder, at: float) -> None:
        agents = self.agents
        agents.seen(type(order).__name__, at)
        match order:
            case SpawnWorker(worker=worker, role=role):
                self.spawned += 1
                first = role is not Role.STANDBY and agents.step == 0
                self.send(facts.WorkerStarted(worker, self.spawned))
                self.send(facts.WorkerReady(worker, StepNo(0) if first else NO_STATE, f"tcp:h:{worker}", "layout", 1.0))
            case HaltGeneration(worker=worker, generation=generation):
                self.send(facts.WorkerHalted(worker, generation, agents.step))
            case JoinGeneration(worker=worker, generation=generation):
                self.members[worker] = generation
                self.send(facts.WorkerResumed(worker, generation))
            case ProveAlive(worker=worker):
                self.send(WorkerAlive(worker))
            case FenceWorker(worker=worker) | ReleaseWorker(worker=worker):
                if self.members.pop(worker, None) is not None:
                    self.send(facts.WorkerExited(worker, -9, at))
            case _:
                pass


async def serve(words: argparse.Namespace) -> None:
    """Connect all agents, then carry out the commands on standard input."""
    agents, loop = Agents(words.nproc, words.token), asyncio.get_running_loop()
    for number in range(words.first, words.first + words.count, _AT_ONCE):
        new = [Agent(agents, each) for each in range(number, min(number + _AT_ONCE, words.first + words.count))]
        agents.agents += new
        await asyncio.gather(
            *(loop.create_connection(lambda made=made: made, "127.0.0.1", words.port) for made in new)  # type: ignore[misc]
        )
        await asyncio.gather(*(made.ready for made in new))
    say(None)
    lines = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    doing = {"report": agents.report, "commit": agents.commit, "kill": agents.kill}
    while line := await lines.readline():
        say(doing[line.decode().strip()]())


def say(what: Any) -> None:
    """Print a line of JSON for the parent process."""
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("port", "first", "count", "nproc"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--token", required=True)
    asyncio.run(serve(parser.parse_args()))
