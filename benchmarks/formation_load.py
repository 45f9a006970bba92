"""Bytes that coordinator and agents send to form a generation, counted with the coordinator's real state machine.

Described in `rendezvous.py`.
"""

from collections import Counter
from typing import NamedTuple

import msgspec
from forking import PER_NODE
from membership import Drive

from regrow.core.ids import Instant, NodeId, Rank, StepNo
from regrow.core.messages.tables import FetchTable, KeepTable
from regrow.core.messages.unions import AgentOrder, Fact
from regrow.membership.machine import Command


class FormationLoad(NamedTuple):
    """Bytes for one generation: all that the coordinator sends, and the most that one agent forwards."""

    coordinator: int
    agent: int


class Counted(Drive):
    """A job whose coordinator's orders are encoded as by its server, and counted."""

    def __init__(self, world: int) -> None:
        super().__init__(world // PER_NODE, PER_NODE)
        self._encoder = msgspec.msgpack.Encoder()
        self._sent = 0
        self._whole = 0
        self._asked: Counter[str] = Counter()
        self._handle = self.machine.handle
        self.machine.handle = self._counting  # type: ignore[method-assign]

    def _counting(self, event: Fact, now: Instant) -> list[Command]:
        commands = self._handle(event, now)
        for command in commands:
            if isinstance(command, AgentOrder):
                size = len(self._encoder.encode(command))
                self._sent += size
                self._whole = max(self._whole, size) if isinstance(command, KeepTable) else self._whole
            if isinstance(command, FetchTable):
                self._asked[command.source] += 1
        return commands

    def take(self) -> FormationLoad:
        """The bytes since the last call."""
        load = FormationLoad(self._sent, self._whole * max(self._asked.values(), default=0))
        self._sent, self._whole, self._asked = 0, 0, Counter()
        return load


def formations(world: int) -> dict[str, FormationLoad]:
    """Bytes of starting all workers, of the first generation, of that after a kill, and of that after a node's loss."""
    job = Counted(world)
    nodes, nproc = job.machine.spec.nodes, job.machine.spec.nproc
    loads: dict[str, FormationLoad] = {}
    job.join(NodeId(f"n{node}") for node in range(nodes))
    loads["start"] = job.take()
    job.ready(list(job.machine.roster.places.values()), StepNo(0))
    loads["form"] = job.take()
    job.resume(StepNo(0))
    for name, lost, step in (("kill", [Rank(world // 2)], 1), ("node", range(nproc, 2 * nproc), 2)):
        job.take()
        job.lose(lost, StepNo(step))
        loads[name] = job.take()
    return loads
